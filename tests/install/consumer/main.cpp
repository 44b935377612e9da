// A program outside of the project: prints the version of the library that it linked.

#include <kvgrid/version.h>

#include <cstdio>
#include <string_view>

int main() {
    if (std::string_view(kvgrid::version()) != KVGRID_VERSION) return 1;
    std::printf("kvgrid %s\n", kvgrid::version());
    return 0;
}
