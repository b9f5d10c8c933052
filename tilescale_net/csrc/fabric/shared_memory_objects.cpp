#include "shared_memory_objects.h"

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

namespace tsn::fabric {
namespace {
constexpr const char* kScheme = "fi_shm://"; // followed by the object's name

// Whether no process has this number. One that its parent has not waited for yet has ended too.
bool ended(long pid) {
  if (pid <= 0) return false;
  if (kill(static_cast<pid_t>(pid), 0)) return errno == ESRCH;
  char path[64], text[512];
  std::snprintf(path, sizeof path, "/proc/%ld/stat", pid);
  FILE* file = std::fopen(path, "re");
  if (!file) return false;
  const size_t size = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[size] = 0;
  const char* after = std::strrchr(text, ')'); // of the program's name, which may hold anything
  return after && (std::strncmp(after, ") Z", 3) == 0 || std::strncmp(after, ") X", 3) == 0);
}

// Removes the objects of this user for which `chosen(name, owner)` holds.
void remove_if(const std::function<bool(const char*, long)>& chosen) {
  DIR* folder = opendir("/dev/shm");
  if (!folder) return;
  while (const dirent* entry = readdir(folder)) {
    long pid = 0, uid = -1;
    int end = 0;
    if (std::sscanf(entry->d_name, "%ld:%ld:%*d%n", &pid, &uid, &end) != 2 || !end || uid != (long)geteuid()) continue;
    struct stat file;
    if (fstatat(dirfd(folder), entry->d_name, &file, AT_SYMLINK_NOFOLLOW) || file.st_uid != geteuid()) continue;
    if (chosen(entry->d_name, pid)) unlinkat(dirfd(folder), entry->d_name, 0);
  }
  closedir(folder);
}

} // namespace

void remove_objects_of_ended_processes() {
  remove_if([](const char*, long owner) { return ended(owner); });
}

void remove_objects_of_endpoint(const std::string& address) {
  const size_t scheme = std::strlen(kScheme);
  if (address.compare(0, scheme, kScheme) != 0) return;
  const std::string name = address.c_str() + scheme; // the address ends with a zero byte
  // Large transfers have objects of their own, named after the endpoint.
  remove_if([&](const char* object, long) {
    return name == object || std::strncmp(object, (name + "_").c_str(), name.size() + 1) == 0;
  });
}

std::string no_room_for_shared_memory() {
  constexpr uint64_t kRegion = 17000000; // bytes, of the endpoint that the provider reckons with, 1.17 to 2.5
  struct statvfs room;
  if (statvfs("/dev/shm", &room)) return "; there is no /dev/shm, which it needs";
  const uint64_t free = (uint64_t)room.f_bsize * room.f_bavail, processors = (uint64_t)sysconf(_SC_NPROCESSORS_ONLN);
  if (free >= kRegion * processors) return "";
  return "; libfabric offers it only while /dev/shm has room for an endpoint on each of the host's " +
         std::to_string(processors) + " processors, " + std::to_string(kRegion * processors / 1000000) +
         " MB, and now " + std::to_string(free / 1000000) +
         " MB are free: make it larger (docker run --shm-size=…), or end what fills it";
}

} // namespace tsn::fabric
