# Installs BUILD into a scratch prefix, then configures, builds and runs CONSUMER against it.

function(step)
    list(JOIN ARGN " " line)
    message(STATUS "${line}")
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
    message("${output}")
    if(NOT status EQUAL 0)
        message(FATAL_ERROR "exit code ${status}: ${line}")
    endif()
    set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${SCRATCH})
set(prefix ${SCRATCH}/prefix)
step(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
step(${CMAKE_COMMAND} -S ${CONSUMER} -B ${SCRATCH}/build -G ${GENERATOR}
    -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_PREFIX_PATH=${prefix})
step(${CMAKE_COMMAND} --build ${SCRATCH}/build)
step(${SCRATCH}/build/consumer)
if(NOT output MATCHES "kvgrid ${VERSION}\n")
    message(FATAL_ERROR "the consumer did not print the version ${VERSION}")
endif()

# The installed program finds its models and traces next to itself.
step(${prefix}/bin/kvgrid --version)
if(NOT output MATCHES "${VERSION}")
    message(FATAL_ERROR "the installed program did not print the version ${VERSION}")
endif()
step(${prefix}/bin/kvgrid plan --model llama-3.1-8b --ranks 8 --context 4K)
