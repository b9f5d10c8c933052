// What a rail does less often: messages, receives, failures, and the completions that are not of writes and reads.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "rail_data.h"

namespace tsn::fabric {

Post Rail::post_error(ssize_t rc, const char* operation, int peer) {
  error = std::string(operation) + (peer >= 0 ? " to peer " + std::to_string(peer) : "") + " over rail " +
          std::to_string(index_) + " was refused: " + library_.error(rc);
  return Post::error;
}

Post Rail::on_post_failed(ssize_t rc, uint32_t slot, const char* operation) {
  const int peer = slots_[slot].peer;
  give(slot);
  return rc == -FI_EAGAIN ? Post::again : post_error(rc, operation, peer);
}

Post Rail::write_more(const Target& to, const void* source, void* desc, const Transport::Copy& copy) {
  uint32_t slot;
  if (!take(free_, slot, kCopy, to.peer, copy.cookie)) return Post::again;
  iovec iov = {const_cast<void*>(source), copy.bytes};
  fi_rma_iov target = {to.remote, copy.bytes, to.key};
  fi_msg_rma message = {};
  message.msg_iov = &iov;
  message.desc = &desc;
  message.iov_count = 1;
  message.addr = to.address;
  message.rma_iov = &target;
  message.rma_iov_count = 1;
  message.context = context(slot);
  message.data = copy.imm;
  const uint64_t flags = op_flags_ | FI_COMPLETION | FI_MORE | (copy.has_imm ? FI_REMOTE_CQ_DATA : 0);
  return post_result(fi_writemsg(ep_.get(), &message, flags), slot, "a write");
}

Post Rail::read_more(const Target& from, void* destination, void* desc, const Transport::Copy& copy) {
  uint32_t slot;
  if (!take(free_, slot, kCopy, from.peer, copy.cookie)) return Post::again;
  iovec iov = {destination, copy.bytes};
  fi_rma_iov source = {from.remote, copy.bytes, from.key};
  fi_msg_rma message = {};
  message.msg_iov = &iov;
  message.desc = &desc;
  message.iov_count = 1;
  message.addr = from.address;
  message.rma_iov = &source;
  message.rma_iov_count = 1;
  message.context = context(slot);
  return post_result(fi_readmsg(ep_.get(), &message, FI_COMPLETION | FI_MORE), slot, "a read");
}

// Sends by copy, without a slot; the completion that the provider does not report is kept for the next poll.
Post Rail::inject(int peer, fi_addr_t address, const void* data, size_t bytes, uint64_t cookie, const char* operation) {
  const ssize_t rc = fi_inject(ep_.get(), data, bytes, address);
  if (rc == 0) {
    if (cookie != kSilent) ready_.push_back(Event{Event::done, peer, index_, 0, cookie, nullptr, 0, 0, nullptr});
    return Post::ok;
  }
  return rc == -FI_EAGAIN ? Post::again : post_error(rc, operation, peer);
}

Post Rail::message(int peer, fi_addr_t address, const void* data, uint32_t bytes, uint64_t cookie) {
  const Header header = {self_, kMagic, tokens_[peer]};
  const size_t total = bytes + sizeof header;
  if (total <= inject_ && total <= 256) {
    char small[256];
    std::memcpy(small, &header, sizeof header);
    std::memcpy(small + sizeof header, data, bytes);
    return inject(peer, address, small, total, cookie, "a message");
  }
  uint32_t slot;
  if (!take(free_, slot, kMessage, peer, cookie)) return Post::again;
  char* copy = buffer(slot);
  std::memcpy(copy, &header, sizeof header);
  std::memcpy(copy + sizeof header, data, bytes);
  iovec iov = {copy, total};
  void* desc = buffers_desc_;
  fi_msg message = {};
  message.msg_iov = &iov;
  message.desc = &desc;
  message.iov_count = 1;
  message.addr = address;
  message.context = context(slot);
  // Not the endpoint's delivery-complete: a message is acknowledged by the layer that requests it, if at all.
  return post_result(fi_sendmsg(ep_.get(), &message, FI_COMPLETION), slot, "a message");
}

Post Rail::send(int peer, fi_addr_t address, const void* source, void* desc, uint64_t bytes, uint64_t cookie,
                bool on_host) {
  if (bytes <= inject_ && on_host) return inject(peer, address, source, bytes, cookie, "a send");
  uint32_t slot;
  if (!take(free_, slot, kCopy, peer, cookie)) return Post::again;
  return post_result(fi_send(ep_.get(), source, bytes, desc, address, context(slot)), slot, "a send");
}

Post Rail::receive(void* destination, void* desc, uint64_t bytes, uint64_t cookie) {
  uint32_t slot;
  if (!take(free_receives_, slot, kReceive, -1, cookie)) return Post::again;
  return post_result(fi_recv(ep_.get(), destination, bytes, desc, FI_ADDR_UNSPEC, context(slot)), slot, "a receive");
}

void Rail::post_buffers() {
  while (!repost_.empty()) {
    const uint32_t slot = repost_.back();
    const ssize_t rc =
        fi_recv(ep_.get(), buffer(slot), max_message_ + sizeof(Header), buffers_desc_, FI_ADDR_UNSPEC, context(slot));
    if (rc == -FI_EAGAIN) return;
    repost_.pop_back();
    if (rc == 0) {
      slots_[slot] = Slot{kSilent, -1, kBuffer};
      continue;
    }
    error = "posting a receive over rail " + std::to_string(index_) + " failed: " + library_.error(rc);
    Event event;
    fail(event, -1, kSilent, static_cast<int>(-rc), error);
    ready_.push_back(event);
  }
}

void Rail::fail(Event& event, int peer, uint64_t cookie, int code, const std::string& text) {
  texts_.push_back(text);
  needs_repost_ = true;
  event = Event{Event::failed, peer, index_, 0, cookie, nullptr, 0, code, texts_.back().c_str()};
}

// The completions that completions() leaves: immediates, messages, receives, and what no slot belongs to.
bool Rail::other_completion(const fi_cq_data_entry& entry, Event& event) {
  const uint32_t slot = slot_of(entry.op_context);
  // Some providers repeat the flag in the completion of the write itself.
  if ((entry.flags & FI_REMOTE_CQ_DATA) && !(entry.flags & (FI_RECV | FI_WRITE))) {
    // With FI_RX_CQ_DATA, an immediate uses up one of the posted receives.
    if (imm_consumes_ && slot < slots_.size()) {
      if (slots_[slot].kind == kBuffer) recycle(slot);
      else if (slots_[slot].kind == kReceive) give(slot);
    }
    event = Event{Event::immediate, -1, index_, static_cast<uint32_t>(entry.data), kSilent, nullptr, 0, 0, nullptr};
    return true;
  }
  if (slot >= slots_.size() || slots_[slot].kind == kFree) {
    if (!entry.op_context) return false; // an injected message of a provider that reports those
    fail(event, -1, kSilent, FI_EOTHER, "rail " + std::to_string(index_) + " completed an operation never posted");
    return true;
  }
  const Slot done = slots_[slot];
  switch (done.kind) {
  case kReceive:
    give(slot);
    event = Event{Event::done, -1, index_, 0, done.cookie, nullptr, entry.len, 0, nullptr};
    return done.cookie != kSilent;
  case kBuffer: {
    recycle(slot); // posted again at the next poll, so that the payload lives until then
    Header header;
    std::memcpy(&header, buffer(slot), sizeof header);
    const bool known = entry.len >= sizeof header && header.magic == kMagic && header.token == token_ &&
                       static_cast<uint32_t>(header.sender) < known_.size() && known_[header.sender];
    if (!known) {
      ++strangers_;
      return false;
    }
    event = Event{
        Event::message, header.sender, index_, 0, kSilent, buffer(slot) + sizeof header, entry.len - sizeof header, 0,
        nullptr};
    return true;
  }
  default:
    give(slot);
    event = Event{Event::done, done.peer, index_, 0, done.cookie, nullptr, 0, 0, nullptr};
    return done.cookie != kSilent;
  }
}

// Takes one error from the completion queue.
bool Rail::read_cq_error(Event& event) {
  // Newer libraries write a longer entry than older headers declare.
  union {
    fi_cq_err_entry entry;
    char room[256];
  } u = {};
  if (fi_cq_readerr(cq_.get(), &u.entry, 0) != 1) return false;
  const uint32_t slot = slot_of(u.entry.op_context);
  int peer = -1;
  uint64_t cookie = kSilent;
  const char* what = "an operation";
  if (slot < slots_.size() && slots_[slot].kind != kFree) {
    const Slot failed = slots_[slot];
    peer = failed.peer;
    cookie = failed.cookie;
    what = failed.kind == kCopy ? "a transfer" : failed.kind == kMessage ? "a message" : "a receive";
    if (failed.kind == kBuffer) recycle(slot);
    else give(slot);
  }
  char detail[128] = "";
  const char* provider_text = fi_cq_strerror(cq_.get(), u.entry.prov_errno, u.entry.err_data, detail, sizeof detail);
  std::string text = std::string(what) + (peer >= 0 ? " to peer " + std::to_string(peer) : "") + " over rail " +
                     std::to_string(index_) + " failed: " + library_.error(-static_cast<int64_t>(u.entry.err));
  if (provider_text && *provider_text) text += std::string(", ") + provider_text;
  // Some providers answer with a general error and keep the system's own beside it.
  const bool hidden = (u.entry.err == FI_EIO || u.entry.err == FI_EOTHER) && means_gone(std::abs(u.entry.prov_errno));
  fail(event, peer, cookie, hidden ? std::abs(u.entry.prov_errno) : u.entry.err, text);
  return true;
}

// The completion queue could not be read, or holds an error. False when there is nothing to tell after all.
bool Rail::on_cq_error(ssize_t code, Event& event) {
  if (code == -FI_EAVAIL) return read_cq_error(event);
  fail(event, -1, kSilent, static_cast<int>(-code),
       "reading completions of rail " + std::to_string(index_) + " failed: " + library_.error(code));
  return true;
}

void Rail::repost_buffers() {
  if (ready_.empty()) texts_.clear(); // those of events in `ready_` have not been handed out yet
  post_buffers();
  needs_repost_ = !repost_.empty() || !texts_.empty();
}

int Rail::take_ready(Event* events, int capacity) {
  const int n = std::min(capacity, static_cast<int>(ready_.size()));
  std::copy(ready_.begin(), ready_.begin() + n, events);
  ready_.erase(ready_.begin(), ready_.begin() + n);
  return n;
}

} // namespace tsn::fabric
