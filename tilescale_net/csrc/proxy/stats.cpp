#include "tilescale_net/csrc/proxy/stats.h"

#include <algorithm>

namespace tsn::proxy {
namespace {

void add_stage(std::map<std::string, double>* out, const std::string& name, const ProxyStats* const* threads, int n,
               StageStats ProxyStats::* stage) {
  double count = 0, sum = 0, max = 0, bucket[48] = {};
  for (int i = 0; i < n; i++) {
    const StageStats& s = threads[i]->*stage;
    count += (double)s.count.get();
    sum += (double)s.sum.get();
    max = std::max(max, (double)s.max.get());
    for (int b = 0; b < 48; b++) bucket[b] += (double)s.bucket[b].get();
  }
  const double us = 1e-3 / ticks_per_ns();
  // Percentiles are upper ends of their buckets, so within a factor of two.
  auto percentile = [&](double share) {
    double seen = 0;
    for (int b = 0; b < 48; b++)
      if ((seen += bucket[b]) >= share * count) return std::min(max, (double)(2ull << b)) * us;
    return max * us;
  };
  (*out)[name + "_count"] = count;
  (*out)[name + "_us_mean"] = count > 0 ? sum / count * us : 0;
  (*out)[name + "_us_p50"] = count > 0 ? percentile(0.5) : 0;
  (*out)[name + "_us_p99"] = count > 0 ? percentile(0.99) : 0;
  (*out)[name + "_us_max"] = max * us;
}

} // namespace

std::map<std::string, double> summarise(const ProxyStats* const* threads, int count) {
  std::map<std::string, double> out;
  auto sum = [&](const char* name, Counter ProxyStats::* c) {
    double v = 0;
    for (int i = 0; i < count; i++) v += (double)(threads[i]->*c).get();
    out[name] = v;
  };
  auto most = [&](const char* name, Counter ProxyStats::* c) {
    double v = 0;
    for (int i = 0; i < count; i++) v = std::max(v, (double)(threads[i]->*c).get());
    out[name] = v;
  };
  sum("puts", &ProxyStats::puts);
  sum("put_signals", &ProxyStats::put_signals);
  sum("put_values", &ProxyStats::put_values);
  sum("signals", &ProxyStats::signals);
  sum("gets", &ProxyStats::gets);
  sum("fences", &ProxyStats::fences);
  sum("flushes", &ProxyStats::flushes);
  sum("bytes_put", &ProxyStats::bytes_put);
  sum("bytes_got", &ProxyStats::bytes_got);
  sum("chunks", &ProxyStats::chunks);
  sum("messages", &ProxyStats::messages);
  sum("records", &ProxyStats::records);
  sum("inlined", &ProxyStats::inlined);
  sum("delegated", &ProxyStats::delegated);
  sum("unrung", &ProxyStats::unrung);
  sum("retries", &ProxyStats::retries);
  sum("held", &ProxyStats::held);
  sum("nameless_failures", &ProxyStats::nameless_failures);
  sum("rejected_messages", &ProxyStats::rejected_messages);
  sum("rejected_at_fabric", &ProxyStats::rejected_at_fabric);
  out["rejected_messages"] += out["rejected_at_fabric"];
  out.erase("rejected_at_fabric");
  sum("chunks_in", &ProxyStats::chunks_in);
  sum("records_in", &ProxyStats::records_in);
  sum("signals_applied", &ProxyStats::signals_applied);
  sum("acks_sent", &ProxyStats::acks_sent);
  most("queue_depth_max", &ProxyStats::queue_depth_max);
  most("in_flight_max", &ProxyStats::in_flight_max);
  add_stage(&out, "pop", threads, count, &ProxyStats::pop);
  add_stage(&out, "post", threads, count, &ProxyStats::post);
  add_stage(&out, "completion", threads, count, &ProxyStats::completion);
  add_stage(&out, "flush", threads, count, &ProxyStats::flush);
  return out;
}

} // namespace tsn::proxy
