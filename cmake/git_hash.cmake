# Run at build time: writes OUTPUT, a header that defines KVGRID_GIT_HASH, when the hash has changed.

set(hash "unknown")
find_program(git git)
if(git)
    execute_process(COMMAND ${git} -C ${SOURCE} rev-parse --show-prefix
        OUTPUT_VARIABLE prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
    if(status EQUAL 0 AND prefix STREQUAL "")
        execute_process(COMMAND ${git} -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude=*
            OUTPUT_VARIABLE described OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
        if(status EQUAL 0)
            set(hash "${described}")
        endif()
    endif()
endif()
set(content "#define KVGRID_GIT_HASH \"${hash}\"\n")
set(previous "")
if(EXISTS ${OUTPUT})
    file(READ ${OUTPUT} previous)
endif()
if(NOT content STREQUAL previous)
    file(WRITE ${OUTPUT} "${content}")
endif()
