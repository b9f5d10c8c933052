#include "libfabric_transport.h"

#include <algorithm>
#include <atomic>
#include <cstdio>

#include "blob.h"
#include "tilescale_net/csrc/fabric/rail.h"

namespace tsn::fabric {
namespace {
constexpr uint32_t kAddressMagic = 0x54534e41; // "TSNA"
constexpr uint32_t kKeyMagic = 0x54534e4b;     // "TSNK"
constexpr uint64_t kMostRails = 1024;
void warn_of_emulated_writes(const std::string& provider) {
  static std::atomic<bool> warned{false};
  if (!warned.exchange(true))
    fprintf(stderr,
            "tilescale_net: warning: provider %s emulates RDMA writes by copies at the target, which is slow; update "
            "the EFA installer (libfabric 1.18 or later) and use a NIC with RDMA write\n",
            provider.c_str());
}

} // namespace

LibfabricTransport::LibfabricTransport(const TransportOptions& options)
    : library_(load_library(options.library, options.library_fallback)), selection_(select_provider(library_, options)),
      n_rails_(static_cast<int>(selection_.rails.size())) {
  Properties& p = properties_;
  p.device_memory = selection_.device_memory;
  for (int r = 0; r < n_rails_; ++r) {
    rails_.push_back(std::make_unique<Rail>(library_, selection_.rails[r].get(), options, r, selection_.device_memory));
    p.device_memory = p.device_memory && rails_.back()->device_memory();
    const fi_info* info = rails_.back()->info();
    // A NIC that carries several rails counts once.
    const bool repeated =
        ("," + p.interface + ",").find("," + std::string(info->domain_attr->name) + ",") != std::string::npos;
    if (!repeated && info->nic && info->nic->link_attr)
      p.link_gbps += static_cast<double>(info->nic->link_attr->speed) / 1e9;
    p.interface += (r ? "," : "") + std::string(info->domain_attr->name);
  }
  const Rail& rail = *rails_[0];
  const fi_info* info = rail.info();
  p.provider = provider_name(info);
  p.version = library_.version_text;
  p.library = library_.path;
  p.rails = n_rails_;
  p.max_send = rail.max_send();
  p.max_write = max_write_ = rail.max_rma();
  p.max_message = rail.max_message();
  p.inject_bytes = rail.inject_bytes();
  p.depth = rail.depth();
  p.imm_bits = 32;
  p.immediates = rail.immediates();
  for (const auto& each : rails_) p.immediates = std::min(p.immediates, each->immediates());
  p.delivery_complete = selection_.delivery_complete;
  p.ordered_messages = (info->tx_attr->msg_order & FI_ORDER_SAS) && (info->rx_attr->msg_order & FI_ORDER_SAS);
  p.emulated_write = rail.emulated_write();
  if (p.emulated_write) warn_of_emulated_writes(p.provider);
  p.doorbells = rail.is_efa();
  p.remote_progress = info->domain_attr->data_progress != FI_PROGRESS_AUTO;
}

LibfabricTransport::~LibfabricTransport() {
  for (auto& rail : rails_)
    if (!rail->binds_memory_to_endpoint()) rail->close_endpoint();
  mrs_.clear();
}

void LibfabricTransport::abandon() {
  if (selection_.shared_memory) selection_.shared_memory->remove();
}

std::string LibfabricTransport::address() const {
  BlobWriter blob(kAddressMagic);
  blob.text(properties_.provider);
  blob.number(rails_.size());
  for (const auto& rail : rails_) {
    blob.text(rail->name());
    blob.number(rail->token());
  }
  return blob.take();
}

void LibfabricTransport::connect(int peer, const std::string& address) {
  if (peer < 0) throw FabricError("connect: peer " + std::to_string(peer) + " is negative");
  BlobReader blob(address, kAddressMagic, "the address of peer " + std::to_string(peer));
  const std::string provider = blob.text();
  if (provider != properties_.provider)
    throw FabricError("peer " + std::to_string(peer) + " uses provider '" + provider + "', this process '" +
                      properties_.provider + "': set TSN_PROVIDER alike on all hosts");
  const uint64_t count = blob.number();
  if (count < 1 || count > kMostRails)
    throw FabricError("the address of peer " + std::to_string(peer) + " has " + std::to_string(count) +
                      " rails; there may be 1 to " + std::to_string(kMostRails));
  std::vector<std::string> theirs(count);
  std::vector<uint64_t> tokens(count);
  for (uint64_t i = 0; i < count; ++i) {
    theirs[i] = blob.text();
    tokens[i] = blob.number();
  }

  const size_t at = static_cast<size_t>(peer) * n_rails_;
  if (peers_.size() < at + n_rails_) peers_.resize(at + n_rails_, FI_ADDR_UNSPEC);
  if (peers_[at] != FI_ADDR_UNSPEC) throw FabricError("peer " + std::to_string(peer) + " is connected already");
  // Rail r sends to their rail r % theirs; their rails must be known here before they send.
  const int n_theirs = static_cast<int>(theirs.size());
  for (int r = 0; r < n_rails_; ++r) {
    peers_[at + r] = rails_[r]->insert(theirs[r % n_theirs]);
    rails_[r]->expect_messages_from(peer, tokens[r % n_theirs]);
    for (int s = 0; s < n_theirs; ++s)
      if (s != r % n_theirs && s % n_rails_ == r) rails_[r]->insert(theirs[s]);
  }
}

Region LibfabricTransport::register_memory(const Memory& memory) {
  if (!memory.base || !memory.bytes)
    throw FabricError("registering memory: " + std::to_string(memory.bytes) + " bytes at a " +
                      (memory.base ? "valid" : "null") + " address");
  if (memory.kind == Memory::cuda && !properties_.device_memory)
    throw FabricError("provider '" + properties_.provider +
                      "' cannot register GPU memory: stage through pinned host memory");
  std::vector<Fid<fid_mr>> mrs;
  for (auto& rail : rails_) mrs.push_back(rail->register_memory(memory));
  for (auto& mr : mrs) {
    sources_.push_back(
        {static_cast<char*>(memory.base), memory.bytes, fi_mr_desc(mr.get()), memory.kind == Memory::host});
    mrs_.push_back(std::move(mr));
  }
  return static_cast<Region>(n_locals_++);
}

Region LibfabricTransport::checked(Region region) const {
  if (static_cast<uint32_t>(region) >= n_locals_ || !source(region, 0).bytes)
    throw FabricError("region " + std::to_string(region) + " is not registered");
  return region;
}

void LibfabricTransport::release_memory(Region region) {
  const size_t first = static_cast<size_t>(checked(region)) * n_rails_;
  for (int r = 0; r < n_rails_; ++r) {
    sources_[first + r].bytes = 0;
    mrs_[first + r].reset();
  }
}

std::string LibfabricTransport::region_key(Region region) const {
  const Source& memory = source(checked(region), 0);
  BlobWriter blob(kKeyMagic);
  blob.number(memory.bytes);
  blob.number(n_rails_);
  for (int r = 0; r < n_rails_; ++r) {
    blob.number(rails_[r]->remote_base(memory.base));
    blob.number(fi_mr_key(mrs_[static_cast<size_t>(region) * n_rails_ + r].get()));
  }
  return blob.take();
}

RemoteRegion LibfabricTransport::add_remote(int peer, const std::string& key) {
  if (!valid_peer(0, peer)) throw FabricError("add_remote: peer " + std::to_string(peer) + " is not connected");
  BlobReader blob(key, kKeyMagic, "the memory key of peer " + std::to_string(peer));
  const uint64_t bytes = blob.number();
  const uint64_t count = blob.number();
  if (count < 1 || count > kMostRails)
    throw FabricError("the memory key of peer " + std::to_string(peer) + " has " + std::to_string(count) + " rails");
  std::vector<Target> theirs(count);
  for (Target& rail : theirs) {
    rail.base = blob.number();
    rail.key = blob.number();
  }
  for (int r = 0; r < n_rails_; ++r) {
    const Target& rail = theirs[r % theirs.size()];
    targets_.push_back({address_of(r, peer), rail.base, bytes, rail.key, peer});
  }
  return static_cast<RemoteRegion>(n_remotes_++);
}

// Checks come first and in one expression; a failed one is diagnosed separately, off the data path.
Post LibfabricTransport::refuse(std::string why) {
  error_ = std::move(why);
  return Post::error;
}

TSN_HOT Post LibfabricTransport::forward(Post post, Rail& rail) {
  if (__builtin_expect(post == Post::error, 0)) error_ = rail.error;
  return post;
}

bool LibfabricTransport::valid_peer(int rail, int peer) const {
  return valid_rail(rail) && peer >= 0 && static_cast<size_t>(peer) * n_rails_ < peers_.size() &&
         address_of(rail, peer) != FI_ADDR_UNSPEC;
}

TSN_HOT bool LibfabricTransport::valid_source(int rail, Region local, uint64_t offset, uint64_t bytes) const {
  if (static_cast<uint32_t>(local) >= n_locals_) return false;
  const Source& from = source(local, rail);
  return bytes && bytes <= from.bytes && offset <= from.bytes - bytes;
}

// A remote region belongs to a connected peer, so the peer needs no further check.
TSN_HOT bool LibfabricTransport::valid(const Copy& c) const {
  if (!valid_rail(c.rail) || static_cast<uint32_t>(c.remote) >= n_remotes_) return false;
  const Target& to = target(c.remote, c.rail);
  return valid_source(c.rail, c.local, c.local_offset, c.bytes) && to.peer == c.peer && c.bytes <= to.bytes &&
         c.remote_offset <= to.bytes - c.bytes && c.bytes <= max_write_;
}

Post LibfabricTransport::refuse_peer(int rail, int peer) {
  if (!valid_rail(rail))
    return refuse("rail " + std::to_string(rail) + " does not exist; there are " + std::to_string(n_rails_));
  return refuse("peer " + std::to_string(peer) + " is not connected");
}

Post LibfabricTransport::refuse_source(Region region, uint64_t offset, uint64_t bytes) {
  return refuse("local bytes [" + std::to_string(offset) + ", +" + std::to_string(bytes) + ") are not inside region " +
                std::to_string(region));
}

Post LibfabricTransport::refuse_copy(const Copy& c) {
  if (!valid_peer(c.rail, c.peer)) return refuse_peer(c.rail, c.peer);
  if (!valid_source(c.rail, c.local, c.local_offset, c.bytes)) return refuse_source(c.local, c.local_offset, c.bytes);
  if (c.bytes > max_write_)
    return refuse(std::to_string(c.bytes) + " bytes exceed the largest transfer of provider '" + properties_.provider +
                  "', " + std::to_string(max_write_));
  return refuse("remote bytes [" + std::to_string(c.remote_offset) + ", +" + std::to_string(c.bytes) +
                ") are not inside region " + std::to_string(c.remote) + " of peer " + std::to_string(c.peer));
}

Post LibfabricTransport::post_write(const Copy& c) {
  if (__builtin_expect(!valid(c), 0)) return refuse_copy(c);
  const Target& to = target(c.remote, c.rail);
  const Source& from = source(c.local, c.rail);
  Rail& rail = *rails_[c.rail];
  return forward(
      rail.write({c.peer, to.address, to.base + c.remote_offset, to.key}, from.base + c.local_offset, from.desc, c),
      rail);
}

Post LibfabricTransport::post_read(const Copy& c) {
  if (__builtin_expect(!valid(c), 0)) return refuse_copy(c);
  if (c.has_imm) return refuse("a read carries no immediate");
  const Target& from = target(c.remote, c.rail);
  const Source& to = source(c.local, c.rail);
  Rail& rail = *rails_[c.rail];
  return forward(
      rail.read({c.peer, from.address, from.base + c.remote_offset, from.key}, to.base + c.local_offset, to.desc, c),
      rail);
}

Post LibfabricTransport::post_message(int rail, int peer, const void* data, uint32_t bytes, uint64_t cookie) {
  if (!valid_peer(rail, peer)) return refuse_peer(rail, peer);
  if (bytes > properties_.max_message)
    return refuse("a message of " + std::to_string(bytes) + " bytes exceeds the limit of " +
                  std::to_string(properties_.max_message));
  return forward(rails_[rail]->message(peer, address_of(rail, peer), data, bytes, cookie), *rails_[rail]);
}

Post LibfabricTransport::post_send(int rail, int peer, Region region, uint64_t offset, uint64_t bytes,
                                   uint64_t cookie) {
  if (!valid_peer(rail, peer)) return refuse_peer(rail, peer);
  if (!valid_source(rail, region, offset, bytes)) return refuse_source(region, offset, bytes);
  if (bytes > properties_.max_send)
    return refuse("a send of " + std::to_string(bytes) + " bytes exceeds the limit of provider '" +
                  properties_.provider + "', " + std::to_string(properties_.max_send));
  const Source& from = source(region, rail);
  return forward(
      rails_[rail]->send(peer, address_of(rail, peer), from.base + offset, from.desc, bytes, cookie, from.on_host),
      *rails_[rail]);
}

Post LibfabricTransport::post_receive(int rail, Region region, uint64_t offset, uint64_t bytes, uint64_t cookie) {
  if (!valid_rail(rail)) return refuse_peer(rail, -1);
  if (properties_.max_message) return refuse("post_receive needs TransportOptions::message_buffers == 0");
  if (!valid_source(rail, region, offset, bytes)) return refuse_source(region, offset, bytes);
  const Source& to = source(region, rail);
  return forward(rails_[rail]->receive(to.base + offset, to.desc, bytes, cookie), *rails_[rail]);
}

bool LibfabricTransport::idle() const {
  return std::all_of(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->idle(); });
}

uint64_t LibfabricTransport::rejected_messages() const {
  uint64_t n = 0;
  for (const auto& rail : rails_) n += rail->rejected_messages();
  return n;
}

uint64_t LibfabricTransport::internal_failures(std::string* last) {
  uint64_t n = 0;
  for (auto& rail : rails_) n += rail->internal_failures(last);
  return n;
}

int LibfabricTransport::poll(Event* events, int capacity) {
  for (auto& rail : rails_) rail->new_poll();
  if (n_rails_ == 1) return rails_[0]->poll(events, capacity);
  int n = 0;
  for (int i = 0; i < n_rails_ && n < capacity; ++i) {
    int r = first_rail_ + i;
    if (r >= n_rails_) r -= n_rails_;
    n += rails_[r]->poll(events + n, capacity - n);
  }
  if (++first_rail_ >= n_rails_) first_rail_ = 0;
  return n;
}

std::unique_ptr<Transport> make_libfabric(const TransportOptions& options) {
  return std::make_unique<LibfabricTransport>(options);
}

} // namespace tsn::fabric
