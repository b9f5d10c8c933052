#include "shared_memory_objects.h"

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <set>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "tilescale_net/csrc/common/secret.h"
#include "transport.h"

namespace tsn::fabric {
namespace {
constexpr const char* kFolder = "/dev/shm";
constexpr const char* kScheme = "fi_shm://"; // followed by the object's name
constexpr const char* kBeginning = "tilescale_net-";

// Names of this process: a lock does not keep its own process out, and opening and closing the file would end it.
std::mutex mine_in_use;
std::set<std::string>& mine() {
  static auto* names = new std::set<std::string>;
  return *names;
}

// Of the whole file. It belongs to the process, not to children made by fork.
bool lock(int fd, int command) {
  struct flock whole = {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  return fcntl(fd, command, &whole) == 0;
}

bool is_linked(int fd) {
  struct stat file;
  return fstat(fd, &file) == 0 && file.st_nlink > 0;
}

// Calls `each` with the name of every file there of this user.
void for_each_file(const std::function<void(int, const std::string&)>& each) {
  DIR* folder = opendir(kFolder);
  if (!folder) return;
  while (const dirent* entry = readdir(folder)) {
    struct stat file;
    if (std::strncmp(entry->d_name, kBeginning, std::strlen(kBeginning)) == 0 &&
        fstatat(dirfd(folder), entry->d_name, &file, AT_SYMLINK_NOFOLLOW) == 0 && file.st_uid == geteuid())
      each(dirfd(folder), entry->d_name);
  }
  closedir(folder);
}

// Objects first: what is left of them when this process is killed here is found again by the file.
void remove_all(const std::string& name) {
  for_each_file([&](int folder, const std::string& file) {
    if (file.compare(0, name.size() + 1, name + ":") == 0) unlinkat(folder, file.c_str(), 0);
  });
  unlink((kFolder + ("/" + name)).c_str());
}

void remove_all_of_ended_processes() {
  for_each_file([&](int folder, const std::string& file) {
    if (file.find(':') != std::string::npos || mine().count(file)) return;
    const int fd = openat(folder, file.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return;
    if (lock(fd, F_SETLK) && is_linked(fd)) remove_all(file);
    close(fd);
  });
}

} // namespace

SharedMemoryName::SharedMemoryName() {
  std::lock_guard<std::mutex> guard(mine_in_use);
  remove_all_of_ended_processes();
  while (lock_ < 0) {
    uint64_t secret = random_secret(); // as letters: numbers in such names stand for processes
    name_ = kBeginning + (std::to_string(getpid()) + "-");
    for (int i = 0; i < 16; ++i, secret >>= 4) name_ += static_cast<char>('a' + (secret & 15));
    lock_ = open((kFolder + ("/" + name_)).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (lock_ < 0 || !lock(lock_, F_SETLKW)) {
      const std::string why = strerror(errno);
      if (lock_ >= 0) close(lock_);
      throw FabricError("provider 'shm' needs a file in /dev/shm that can be locked, " + name_ + ": " + why);
    }
    if (is_linked(lock_)) break;
    close(lock_); // another process found it before it was locked
    lock_ = -1;
  }
  mine().insert(name_);
}

SharedMemoryName::~SharedMemoryName() {
  remove();
  std::lock_guard<std::mutex> guard(mine_in_use);
  close(lock_);
  mine().erase(name_);
}

void SharedMemoryName::give(fi_info* info) const {
  const std::string address = kScheme + name_;
  free(info->src_addr);
  info->src_addr = strdup(address.c_str());
  info->src_addrlen = address.size() + 1;
}

void SharedMemoryName::remove() {
  std::lock_guard<std::mutex> guard(mine_in_use);
  remove_all(name_);
  remove_all_of_ended_processes();
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
