// Preloaded: /dev/shm has a mebibyte left.
#include <cstring>
#include <dlfcn.h>
#include <sys/statvfs.h>

extern "C" int statvfs(const char* path, struct statvfs* room) {
  static const auto real = reinterpret_cast<int (*)(const char*, struct statvfs*)>(dlsym(RTLD_NEXT, "statvfs"));
  const int result = real(path, room);
  if (result == 0 && std::strcmp(path, "/dev/shm") == 0) room->f_bavail = (1 << 20) / room->f_bsize;
  return result;
}
