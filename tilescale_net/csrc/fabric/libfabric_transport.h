// The Transport over libfabric: rails, peers' addresses, and memory regions with their keys.
#pragma once

#include <array>
#include <vector>

#include "provider.h"
#include "rail.h"
#include "transport.h"

namespace tsn::fabric {

class LibfabricTransport final : public Transport {
public:
  explicit LibfabricTransport(const TransportOptions& options);
  ~LibfabricTransport() override;

  const Properties& properties() const override { return properties_; }
  std::string address() const override;
  void connect(int peer, const std::string& address) override;
  Region register_memory(const Memory& memory) override;
  void release_memory(Region region) override;
  std::string region_key(Region region) const override;
  RemoteRegion add_remote(int peer, const std::string& key) override;

  Post post_write(const Copy& copy) override;
  Post post_read(const Copy& copy) override;
  Post post_message(int rail, int peer, const void* data, uint32_t bytes, uint64_t cookie) override;
  Post post_send(int rail, int peer, Region local, uint64_t offset, uint64_t bytes, uint64_t cookie) override;
  Post post_receive(int rail, Region local, uint64_t offset, uint64_t bytes, uint64_t cookie) override;
  int poll(Event* events, int capacity) override;
  bool idle() const override;
  void abandon() override;
  uint64_t rejected_messages() const override;
  uint64_t internal_failures(std::string* last) override;
  const char* last_error() const override { return error_.c_str(); }

private:
  // A local region, or a peer's region, as posts on one rail use it. Both lie in flat arrays indexed by region *
  // rails + rail, so the data path follows few pointers.
  struct Source {
    char* base;
    uint64_t bytes; // 0 once released
    void* desc;
    bool on_host;
  };
  struct Target {
    fi_addr_t address;
    uint64_t base, bytes, key;
    int32_t peer;
  };

  bool valid_rail(int rail) const { return static_cast<uint32_t>(rail) < static_cast<uint32_t>(n_rails_); }
  bool valid_peer(int rail, int peer) const;
  bool valid_source(int rail, Region local, uint64_t offset, uint64_t bytes) const;
  bool valid(const Copy& copy) const;
  fi_addr_t address_of(int rail, int peer) const { return peers_[static_cast<size_t>(peer) * n_rails_ + rail]; }
  const Source& source(Region local, int rail) const {
    return sources_[static_cast<uint32_t>(local) * static_cast<uint32_t>(n_rails_) + static_cast<uint32_t>(rail)];
  }
  const Target& target(RemoteRegion remote, int rail) const {
    return targets_[static_cast<uint32_t>(remote) * static_cast<uint32_t>(n_rails_) + static_cast<uint32_t>(rail)];
  }
  [[gnu::cold]] Post refuse(std::string why);
  [[gnu::cold]] Post refuse_copy(const Copy& copy);
  [[gnu::cold]] Post refuse_source(Region local, uint64_t offset, uint64_t bytes);
  [[gnu::cold]] Post refuse_peer(int rail, int peer);
  Post forward(Post post, Rail& rail);
  Region checked(Region region) const; // throws

  const Library& library_;
  Selection selection_;
  std::vector<std::unique_ptr<Rail>> rails_;
  int n_rails_ = 0;
  Properties properties_;
  int first_rail_ = 0; // where the next poll starts

  uint32_t n_locals_ = 0, n_remotes_ = 0;
  uint64_t max_write_ = 0;
  std::vector<Source> sources_;
  std::vector<Target> targets_;
  std::vector<fi_addr_t> peers_; // [peer * rails + rail], FI_ADDR_UNSPEC where not connected
  std::vector<Fid<fid_mr>> mrs_; // [region * rails + rail]
  std::string error_;
};

} // namespace tsn::fabric
