// A compiled kernel: a shared library that has been loaded and given the simulator's functions.
#pragma once

#include "grid.h"

namespace tsn::sim {

class Library {
public:
  // Throws std::runtime_error with the loader's words.
  explicit Library(const std::string& path);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // Sets launch.entry, .self and the bounds of the code. Throws std::runtime_error when there is no such kernel.
  void bind(const std::string& kernel, Launch& launch) const;

private:
  void* handle_;
};

struct Outcome {
  Failure failure = Failure::none;
  std::string message;
  std::string line;   // of the author's code, if one thread has failed
  std::string remark; // may explain the kernel's own error
  std::string limits; // gaps of the race detector that it has met
  uint64_t switches = 0;
};

// Runs one launch; grids of a process are serial.
Outcome run(const Launch& launch, size_t stack_bytes);

} // namespace tsn::sim
