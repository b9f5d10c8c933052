#include "kernel.h"

#include "live_state.h"
#include "remote.h"

#include <dlfcn.h>
#include <link.h>

namespace tsn::sim {

namespace {

Grid& grid() { return *current_grid; }

const Api kApi = {
    kApiVersion,
    sizeof(Api),
    [](bool polled) { grid().yield(polled); },
    [](int id, int count, bool arrive_only) { grid().block_barrier(id, count, arrive_only); },
    [](VoteOp op, uint64_t value) { return grid().block_vote(op, value); },
    [](WarpOp op, uint32_t mask, uint64_t value, uint32_t argument) { return grid().warp(op, mask, value, argument); },
    [](const void* site) { return grid().active_mask(site); },
    [] { grid().grid_barrier(); },
    [](int id, size_t bytes) { return grid().static_shared(id, bytes); },
    [](const char* name, int64_t offset, uint64_t bytes, uint64_t extent) {
      grid().fail(Failure::out_of_bounds, concat(name, ": access to ", bytes, " bytes at byte offset ", offset,
                                                 ", but it has ", extent, " bytes"));
    },
    [](const char* name, int axis, int64_t index, int64_t extent) {
      grid().fail(Failure::out_of_bounds,
                  concat(name, ": index ", index, " on axis ", axis, " is outside of its extent of ", extent));
    },
    [](const char* message) { grid().fail(Failure::kernel, message); },
    [](const char* text) {
      fprintf(stdout, "%s\n", text);
      fflush(stdout);
    },
    [] { return grid().random(); },
    &kRemoteApi,
    &kTraceApi,
};

int find_text(dl_phdr_info* info, size_t, void* out) {
  auto* launch = static_cast<Launch*>(out);
  const auto entry = reinterpret_cast<uintptr_t>(launch->entry);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    const uintptr_t begin = info->dlpi_addr + segment.p_vaddr, end = begin + segment.p_memsz;
    if (segment.p_type != PT_LOAD || entry < begin || entry >= end) continue;
    launch->text_begin = begin;
    launch->text_end = end;
    return 1;
  }
  return 0;
}

} // namespace

Library::Library(const std::string& path) : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (!handle_) throw std::runtime_error(dlerror());
  auto* api = static_cast<const Api**>(dlsym(handle_, "tsn_sim_api"));
  auto* version = static_cast<const uint32_t*>(dlsym(handle_, "tsn_sim_api_version"));
  if (!api || !version || *version != kApiVersion) {
    dlclose(handle_);
    throw std::runtime_error(path +
                             " was built for another version of the simulator; delete it, and it is built again");
  }
  *api = &kApi;
}

Library::~Library() { dlclose(handle_); }

void Library::bind(const std::string& kernel, Launch& launch) const {
  launch.kernel = kernel;
  launch.self = static_cast<Thread**>(dlsym(handle_, "tsn_sim_self"));
  launch.entry = reinterpret_cast<void (*)(const uint64_t*)>(dlsym(handle_, ("tsn_sim_entry_" + kernel).c_str()));
  if (!launch.self || !launch.entry) throw std::runtime_error("the library holds no kernel " + kernel);
  dl_iterate_phdr(find_text, &launch);
}

Outcome run(const Launch& launch, size_t stack_bytes) {
  static std::mutex mutex;
  static std::map<size_t, std::unique_ptr<StackPool>> pools; // kept: mapping stacks costs more than a small kernel
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<StackPool>& pool = pools[stack_bytes];
  if (!pool) pool = std::make_unique<StackPool>(stack_bytes);
  Outcome outcome;
  Grid grid(launch, *pool);
  current_grid = &grid;
  remote_kernel_begin();
  live_begin(launch);
  grid.run();
  live_end();
  current_grid = nullptr;
  Random random(launch.seed + 1);
  if (grid.failure() == Failure::none) remote_kernel_end(random);
  else flush_pending();
  outcome.failure = grid.failure();
  outcome.message = grid.message();
  outcome.line = grid.line();
  outcome.remark = grid.never_started();
  for (const std::string& gap : grid.gaps()) outcome.limits += (outcome.limits.empty() ? "" : "; ") + gap;
  outcome.switches = grid.switches();
  return outcome;
}

} // namespace tsn::sim
