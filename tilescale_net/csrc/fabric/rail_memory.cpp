// Registration of memory with a rail: host memory, GPU memory as a DMABUF, GPU memory through the peer-memory module.
#include <unistd.h>

#include "rail.h"
#include "tilescale_net/csrc/cuda/driver.h"

namespace tsn::fabric {
namespace {

// A DMABUF over the host pages that hold a range of GPU memory; fd is -1, with the reason, where it cannot be made.
struct DmaBuf {
  explicit DmaBuf(const Memory& memory) {
    const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uint64_t address = reinterpret_cast<uint64_t>(memory.base);
    const uint64_t start = address & ~(page - 1), end = (address + memory.bytes + page - 1) & ~(page - 1);
    offset = address - start;
    try {
      cuda::driver();
      cuda::PrimaryContext context(memory.device);
      fd = cuda::export_dmabuf(start, end - start, &why);
    } catch (const CudaError& e) {
      why = e.what();
    }
  }
  ~DmaBuf() {
    if (fd >= 0) close(fd); // the registration keeps its own reference
  }
  DmaBuf(const DmaBuf&) = delete;

  int fd = -1;
  uint64_t offset = 0; // of the memory inside the file
  std::string why;
};

} // namespace

Fid<fid_mr> Rail::register_memory(const Memory& memory) {
  iovec iov = {memory.base, memory.bytes};
  fi_mr_attr attr = {};
  attr.mr_iov = &iov;
  attr.iov_count = 1;
  attr.access = FI_SEND | FI_RECV;
  if (info_->caps & FI_RMA) attr.access |= FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
  attr.requested_key = new_key();
  if (memory.kind == Memory::cuda) {
    attr.iface = FI_HMEM_CUDA;
    attr.device.cuda = memory.device;
  }

  fid_mr* mr = nullptr;
  std::string tried;
  int rc = -FI_ENOSYS;
#if FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION) >= FI_VERSION(1, 20)
  if (memory.kind == Memory::cuda && FI_VERSION_GE(library_.api, FI_VERSION(1, 20))) {
    const DmaBuf file(memory);
    if (file.fd >= 0) {
      fi_mr_dmabuf dmabuf = {};
      dmabuf.fd = file.fd;
      dmabuf.offset = file.offset;
      dmabuf.len = memory.bytes;
      dmabuf.base_addr = static_cast<char*>(memory.base) - file.offset;
      attr.dmabuf = &dmabuf;
      rc = fi_mr_regattr(domain_.get(), &attr, FI_MR_DMABUF, &mr);
      if (rc) tried = "as DMABUF: " + library_.error(rc) + "; ";
      attr.mr_iov = &iov;
    } else {
      tried = "as DMABUF: " + file.why + "; ";
    }
  }
#endif
  if (rc) rc = fi_mr_regattr(domain_.get(), &attr, 0, &mr); // host memory, or GPU memory by the peer-memory module
  if (rc)
    throw FabricError(
        "registering " + std::to_string(memory.bytes) + " bytes of " +
        (memory.kind == Memory::cuda ? "GPU memory failed on " : "host memory failed on ") + where() + ": " + tried +
        library_.error(rc) +
        (memory.kind == Memory::cuda ? ". Load the nvidia_peermem module or use a libfabric and driver with DMABUF."
                                     : ". Raise the locked-memory limit (ulimit -l).") +
        (rc == -FI_EINVAL || rc == -FI_ENOMEM
             ? " Devices bound the size and the number of regions, too: try a smaller heap (TSN_HEAP_SIZE)."
             : ""));
  Fid<fid_mr> owned(mr);
  if (mr_endpoint_) {
    check(fi_mr_bind(mr, &ep_->fid, 0), "fi_mr_bind");
    check(fi_mr_enable(mr), "fi_mr_enable");
  }
  if (fi_mr_key(mr) == FI_KEY_NOTAVAIL)
    throw FabricError("the memory key of " + where() + " does not fit 64 bits; this package needs one that does");
  return owned;
}

} // namespace tsn::fabric
