// The text that configures the chaos transport.
#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "chaos.h"

namespace tsn::fabric {

ChaosOptions parse_chaos(const std::string& text) {
  const std::string source = text == "on" ? "seed=1,reorder=0.3,split=0.2,eagain=0.1" : text;
  ChaosOptions options;
  struct Field {
    const char* name;
    double* probability;
    uint64_t* number;
  };
  uint64_t imm_bits = 32;
  const Field fields[] = {{"seed", nullptr, &options.seed},
                          {"reorder", &options.reorder, nullptr},
                          {"split", &options.split, nullptr},
                          {"eagain", &options.eagain, nullptr},
                          {"error", &options.error, nullptr},
                          {"delay_us", nullptr, &options.delay_us},
                          {"depth", nullptr, &options.depth},
                          {"max_write", nullptr, &options.max_write},
                          {"error_after", nullptr, &options.error_after},
                          {"error_code", nullptr, &options.error_code},
                          {"stall_after", nullptr, &options.stall_after},
                          {"imm_bits", nullptr, &imm_bits}};
  for (size_t at = 0; at < source.size();) {
    const size_t end = std::min(source.find(',', at), source.size());
    const std::string entry = source.substr(at, end - at);
    at = end + 1;
    const size_t equals = std::min(entry.find('='), entry.size());
    const std::string name = entry.substr(0, equals), value = entry.substr(std::min(equals + 1, entry.size()));
    const Field* field = nullptr;
    std::string known;
    for (const Field& f : fields) {
      if (name == f.name) field = &f;
      known += std::string(known.empty() ? "" : ", ") + f.name;
    }
    if (!field) throw FabricError("chaos: unknown field '" + name + "' in '" + text + "'; known are " + known);
    char* rest = nullptr;
    errno = 0;
    bool good = !value.empty() && value[0] != '-';
    if (field->probability) {
      *field->probability = std::strtod(value.c_str(), &rest);
      good = good && !*rest && *field->probability >= 0 && *field->probability <= 1;
    } else {
      *field->number = std::strtoull(value.c_str(), &rest, 10);
      good = good && !*rest && !errno;
    }
    if (!good)
      throw FabricError("chaos: '" + entry + "' is not " +
                        (field->probability ? "a probability between 0 and 1" : "a whole number") + " in '" + text +
                        "'");
  }
  if (imm_bits < 8 || imm_bits > 32)
    throw FabricError("chaos: imm_bits=" + std::to_string(imm_bits) + " is outside 8 to 32");
  if (options.error_code < 1 || options.error_code > 4095)
    throw FabricError("chaos: error_code=" + std::to_string(options.error_code) + " is outside 1 to 4095");
  options.imm_bits = static_cast<int>(imm_bits);
  return options;
}

} // namespace tsn::fabric
