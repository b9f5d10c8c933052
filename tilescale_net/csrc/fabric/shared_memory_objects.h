// Objects in /dev/shm through which libfabric's shm provider reaches the processes of a host. A process that is killed
// leaves them behind. Whether it lives cannot be told by its number, which means another one in another PID namespace:
// it holds a lock, which ends with it. Objects of other programs are left alone.
#pragma once

#include <memory>
#include <string>

#include <rdma/fabric.h>

namespace tsn::fabric {

// A name that no other process has, for the endpoints of a transport; and a file of that name in /dev/shm, locked as
// long as this object, or the process, lives. The objects of its endpoints have longer names that begin with it.
class SharedMemoryName {
public:
  SharedMemoryName(); // removes what processes of this user that have ended left; throws FabricError
  ~SharedMemoryName();
  SharedMemoryName(const SharedMemoryName&) = delete;
  void operator=(const SharedMemoryName&) = delete;

  // Endpoints that are made of `info` have the name.
  void give(fi_info* info) const;

  // Remove the objects and the file, also while endpoints are open; and what ended processes left.
  void remove();

private:
  std::string name_;
  int lock_ = -1;
};

// What to say where the provider is not offered for want of room; empty where there seems to be enough.
std::string no_room_for_shared_memory();

} // namespace tsn::fabric
