// CHECK for the plain C++ test programs: prints what failed and ends the program with status 1.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

[[noreturn]] inline void check_failed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, condition);
  std::_Exit(1);
}

[[noreturn, gnu::format(printf, 4, 5)]] inline void check_failed(const char* file, int line, const char* condition,
                                                                 const char* format, ...) {
  std::fprintf(stderr, "%s:%d: does not hold: %s: ", file, line, condition);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::_Exit(1);
}

// CHECK(condition) or CHECK(condition, format, arguments...)
#define CHECK(condition, ...)                                                                                          \
  do {                                                                                                                 \
    if (!(condition)) check_failed(__FILE__, __LINE__, #condition, ##__VA_ARGS__);                                     \
  } while (0)
