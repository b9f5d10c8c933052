// The opaque byte strings that processes exchange at set-up: written and read field by field, checked when read.
#pragma once

#include "transport.h"

namespace tsn::fabric {

class BlobWriter {
public:
  explicit BlobWriter(uint32_t magic) { number(magic); }
  void number(uint64_t value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void text(const std::string& value) {
    number(value.size());
    bytes_ += value;
  }
  std::string take() { return std::move(bytes_); }

private:
  std::string bytes_;
};

class BlobReader {
public:
  // `what` names the blob in errors, e.g. "the address of peer 3".
  BlobReader(const std::string& bytes, uint32_t magic, std::string what) : bytes_(bytes), what_(std::move(what)) {
    if (number() != magic) fail();
  }
  uint64_t number() {
    uint64_t value;
    if (bytes_.size() - at_ < sizeof value) fail();
    std::memcpy(&value, bytes_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::string text() {
    const uint64_t size = number();
    if (bytes_.size() - at_ < size) fail();
    at_ += size;
    return bytes_.substr(at_ - size, size);
  }

private:
  [[noreturn]] void fail() const {
    throw FabricError(concat(what_, " is not one (", bytes_.size(),
                             " bytes): do all processes run the same version of this package?"));
  }
  const std::string& bytes_;
  std::string what_;
  size_t at_ = 0;
};

} // namespace tsn::fabric
