#include "fiber.h"

#include <new>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

namespace tsn::sim {

namespace {
constexpr int kStacksPerChunk = 64;
// Linux allows 65530 mappings per process and every guard page costs two: beyond this many chunks stacks go unguarded.
constexpr size_t kGuardedChunks = 320;
// Free stacks that keep their memory.
constexpr size_t kWarmStacks = 4096;
size_t page() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}
} // namespace

StackPool::StackPool(size_t bytes) : bytes_((bytes + page() - 1) / page() * page()), slot_bytes_(bytes_ + page()) {}

StackPool::~StackPool() {
  for (char* chunk : chunks_) munmap(chunk, slot_bytes_ * kStacksPerChunk);
}

void StackPool::grow() {
  void* memory = mmap(nullptr, slot_bytes_ * kStacksPerChunk, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  char* chunk = static_cast<char*>(memory);
  chunks_.push_back(chunk);
  for (int i = kStacksPerChunk - 1; i >= 0; --i) {
    char* slot = chunk + i * slot_bytes_;
    if (chunks_.size() <= kGuardedChunks) mprotect(slot, page(), PROT_NONE);
    free_.push_back(slot + page());
  }
}

char* StackPool::take() {
  if (free_.empty()) grow();
  char* stack = free_.back();
  free_.pop_back();
  return stack;
}

void StackPool::give(char* stack) {
  // Frees the memory of a grid of very many waiting threads.
  if (free_.size() >= kWarmStacks) madvise(stack, bytes_, MADV_DONTNEED);
  free_.push_back(stack);
}

bool StackPool::is_guard(uintptr_t address) const {
  for (size_t i = 0; i < chunks_.size() && i < kGuardedChunks; ++i) {
    const uintptr_t offset = address - reinterpret_cast<uintptr_t>(chunks_[i]);
    if (offset < slot_bytes_ * kStacksPerChunk) return offset % slot_bytes_ < page();
  }
  return false;
}

#if defined(__x86_64__) && !defined(TSN_SIM_PORTABLE_FIBERS)
// Callee-saved registers live on the stack of a suspended context.
asm(R"(
.text
.globl tsn_sim_switch
.hidden tsn_sim_switch
.type tsn_sim_switch, @function
tsn_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
.globl tsn_sim_continue
.hidden tsn_sim_continue
tsn_sim_continue:
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tsn_sim_switch, .-tsn_sim_switch
)");
extern "C" void tsn_sim_continue();
constexpr int kSavedWords = 6;

bool redirect(void* machine_context, void* to) {
  auto& registers = static_cast<ucontext_t*>(machine_context)->uc_mcontext.gregs;
  registers[REG_RSP] = reinterpret_cast<greg_t>(to);
  registers[REG_RIP] = reinterpret_cast<greg_t>(&tsn_sim_continue);
  return true;
}
uintptr_t program_counter(void* machine_context) {
  return static_cast<uintptr_t>(static_cast<ucontext_t*>(machine_context)->uc_mcontext.gregs[REG_RIP]);
}

#elif defined(__aarch64__) && !defined(TSN_SIM_PORTABLE_FIBERS)
asm(R"(
.text
.globl tsn_sim_switch
.hidden tsn_sim_switch
.type tsn_sim_switch, %function
tsn_sim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
.globl tsn_sim_continue
.hidden tsn_sim_continue
tsn_sim_continue:
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size tsn_sim_switch, .-tsn_sim_switch
)");
extern "C" void tsn_sim_continue();

bool redirect(void* machine_context, void* to) {
  auto& machine = static_cast<ucontext_t*>(machine_context)->uc_mcontext;
  machine.sp = reinterpret_cast<uintptr_t>(to);
  machine.pc = reinterpret_cast<uintptr_t>(&tsn_sim_continue);
  return true;
}
uintptr_t program_counter(void* machine_context) { return static_cast<ucontext_t*>(machine_context)->uc_mcontext.pc; }

#else
// Any other machine: POSIX contexts, which cost two system calls per switch.
namespace {
struct Portable {
  ucontext_t context;
};
} // namespace
extern "C" void tsn_sim_switch(void** from, void* to) {
  Portable self;
  *from = &self;
  swapcontext(&self.context, &static_cast<Portable*>(to)->context);
}
bool redirect(void*, void*) { return false; }
uintptr_t program_counter(void*) { return 0; }
#endif

void* make_context(char* stack, size_t bytes, void (*entry)()) {
  // Stacks lie at a power-of-two distance or close to it; a shifted start keeps their hot lines from sharing cache
  // sets.
  const size_t shift = (reinterpret_cast<uintptr_t>(stack) / bytes * 320) % 4096 & ~static_cast<size_t>(63);
  char* top = stack + bytes - 64 - shift;
#if defined(__x86_64__) && !defined(TSN_SIM_PORTABLE_FIBERS)
  auto* words = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~static_cast<uintptr_t>(15));
  *--words = nullptr; // where a caller's return address would be: keeps the stack aligned as after a call
  *--words = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedWords; ++i) *--words = nullptr;
  return words;
#elif defined(__aarch64__) && !defined(TSN_SIM_PORTABLE_FIBERS)
  auto* words = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~static_cast<uintptr_t>(15)) - 20;
  for (int i = 0; i < 20; ++i) words[i] = nullptr;
  words[11] = reinterpret_cast<void*>(entry); // x30
  return words;
#else
  auto* portable = reinterpret_cast<Portable*>((reinterpret_cast<uintptr_t>(top) - sizeof(Portable)) & ~63ull);
  getcontext(&portable->context);
  portable->context.uc_stack.ss_sp = stack;
  portable->context.uc_stack.ss_size = static_cast<size_t>(reinterpret_cast<char*>(portable) - stack);
  portable->context.uc_link = nullptr;
  makecontext(&portable->context, entry, 0);
  return portable;
#endif
}

} // namespace tsn::sim
