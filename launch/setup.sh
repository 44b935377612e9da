# Sourced by launch/quickstart and launch/test: installs what is missing, echoes what it runs.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }

# Echoes a command, then runs it.
run() {
    printf '+ %s\n' "$(printf '%q ' "$@" | sed 's/ $//')"
    "$@"
}

# Everything that building needs, as Debian packages. A name after the colon is a command that will
# do, wherever it came from.
build_packages=(
    cmake:cmake ninja-build:ninja g++:c++
    libopenmpi-dev openmpi-bin:mpirun libhwy-dev libexpected-dev libxxhash-dev libfmt-dev libnuma-dev
    nlohmann-json3-dev libcxxopts-dev libgtest-dev libgmock-dev librapidcheck-dev
)
# What the checks of the source tree need besides.
lint_packages=(python3:python3 clang-format-14:clang-format-14 clang-tidy-14:clang-tidy-14)

# install_packages PACKAGE[:COMMAND]...   installs, by name, those that are missing
install_packages() {
    local entry package command missing=()
    if ! command -v apt-get dpkg-query > /dev/null; then
        echo "Not a Debian system: nothing is installed here. Needed, by their Debian names:"
        printf ' %s' "${@%%:*}"
        echo
        return
    fi
    for entry in "$@"; do
        package=${entry%%:*}
        command=${entry#"$package"}
        command=${command#:}
        if [[ -n $command ]] && command -v "$command" > /dev/null; then continue; fi
        if [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2> /dev/null) == installed ]]; then continue; fi
        missing+=("$package")
    done
    if ((${#missing[@]} == 0)); then return; fi

    say "Installing what is missing: ${missing[*]}"
    local as_root=()
    if ((EUID != 0)); then
        if ! command -v sudo > /dev/null; then
            echo "This needs root, and there is no sudo. Run as root, then start again:" >&2
            echo "    apt-get update && apt-get install --no-install-recommends ${missing[*]}" >&2
            exit 4
        fi
        as_root=(sudo)
    fi
    run "${as_root[@]}" apt-get update -qq
    local install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive
        apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 "${missing[@]}") log
    echo "+ ${install[*]}"
    log=$("${install[@]}" 2>&1) || {
        printf '%s\n' "$log" "apt-get could not install: ${missing[*]}" >&2
        exit 4
    }
}

# cuda_options   sets the array of that name to what preset cuda is configured with here: NCCL may be missing
cuda_options() {
    local folder
    cuda_options=(-DKVGRID_NCCL=OFF)
    for folder in "$(dirname "$(command -v nvcc)")/../include" "$(dirname "$(command -v nvcc)")"/../targets/*/include \
        /usr/include /usr/local/include; do
        if [[ -f $folder/nccl.h ]]; then cuda_options=(-DKVGRID_NCCL=ON); fi
    done
}

# Open MPI refuses to run as root unless told twice.
if ((EUID == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
