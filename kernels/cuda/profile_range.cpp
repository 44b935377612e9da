#include "kernels/profile_range.h"

#include <nvtx3/nvToolsExt.h>

namespace kvgrid {
namespace {

nvtxDomainHandle_t domain() noexcept {
    static const nvtxDomainHandle_t created = nvtxDomainCreateA("kvgrid");
    return created;
}

}  // namespace

ProfileRange::ProfileRange(const char* name) noexcept {
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = name;
    nvtxDomainRangePushEx(domain(), &attributes);
}

ProfileRange::~ProfileRange() {
    nvtxDomainRangePop(domain());
}

}  // namespace kvgrid
