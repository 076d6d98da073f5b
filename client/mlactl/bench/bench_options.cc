#include "client/mlactl/bench/bench_options.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "client/mlactl/cli/option_reader.h"
#include "client/mlactl/cli/output.h"

namespace mla::mlactl {
namespace {

constexpr size_t kMaxList = 32;

struct Preset {
  const char* name;
  uint32_t heads, layers;
};
// All have latent rows of 512 + 64 and heads of 128 + 64 -> 128.
constexpr Preset kPresets[] = {
    {"small", 16, 4},
    {"deepseek-v2-lite", 16, 27},
    {"deepseek-v3", 128, 61},
    {"kimi-k2", 64, 61},
};

v1::Profile ProfileOf(const std::string& name) {
  if (name == "absorbed") return v1::PROFILE_ABSORBED;
  if (name == "append-only") return v1::PROFILE_APPEND_ONLY;
  return v1::PROFILE_EXPANDED;
}

void ReadModel(const Arguments& arguments, OptionReader* reader, v1::ModelSpec* model) {
  std::vector<std::string> names;
  for (const Preset& preset : kPresets) names.emplace_back(preset.name);
  std::string name = kPresets[0].name;
  reader->Choice("preset", names, &name);
  uint32_t heads = 0, layers = 0, lora = 512, rope = 64, nope = 128, v = 128, page_size = 0;
  for (const Preset& preset : kPresets) {
    if (name != preset.name) continue;
    heads = preset.heads;
    layers = preset.layers;
  }
  constexpr uint64_t kMost = 65536;
  reader->Number("heads", 1, kMost, &heads);
  reader->Number("layers", 1, kMost, &layers);
  reader->Number("lora", 1, kMost, &lora);
  reader->Number("rope", 1, kMost, &rope);
  reader->Number("nope", 1, kMost, &nope);
  reader->Number("v", 1, kMost, &v);
  reader->Number("page-size", 0, kMost, &page_size);
  std::string precision = "default";
  reader->Choice("query-precision", {"default", "bf16", "split"}, &precision);
  model->set_query_precision(precision == "bf16"    ? v1::QUERY_PRECISION_BF16
                             : precision == "split" ? v1::QUERY_PRECISION_SPLIT
                                                    : v1::QUERY_PRECISION_UNSPECIFIED);
  v1::Geometry* const geometry = model->mutable_geometry();
  geometry->set_num_heads(heads);
  geometry->set_kv_lora_rank(lora);
  geometry->set_rope_dim(rope);
  geometry->set_nope_dim(nope);
  geometry->set_v_dim(v);
  model->set_layers(layers);
  model->set_page_size(page_size);
  model->set_softmax_scale(1.0 / std::sqrt(static_cast<double>(nope + rope)));
  model->set_kv_dtype(v1::DTYPE_BF16);
  model->set_rope_owner(v1::ROPE_OWNER_WORKER);
}

// The lists whose combinations are the runs.
struct Lists {
  std::vector<std::string> transports = {"auto"}, profiles = {"expanded"};
  std::vector<uint64_t> batches = {1}, rows = {1}, contexts = {1024}, workers = {1};
  std::vector<double> rates = {0};

  size_t Runs() const {
    return transports.size() * profiles.size() * batches.size() * rows.size() * contexts.size() *
           workers.size() * rates.size();
  }
};

Lists ReadLists(const Arguments& arguments, OptionReader* reader) {
  Lists lists;
  if (arguments.Get("transport", "auto") != "auto") {
    reader->Choices("transport", TransportNames(), &lists.transports);
  }
  reader->Choices("profile", {"expanded", "absorbed", "append-only"}, &lists.profiles);
  constexpr uint64_t kMost = 1u << 20;
  reader->Numbers("batch", 1, kMost, kMaxList, &lists.batches);
  reader->Numbers("rows", 1, kMost, kMaxList, &lists.rows);
  reader->Numbers("context", 0, 1u << 30, kMaxList, &lists.contexts);
  reader->Numbers("concurrency", 1, 4096, kMaxList, &lists.workers);
  reader->Reals("rate", 1e-3, 1e7, kMaxList, &lists.rates);
  return lists;
}

// Calls `add` with every combination, the last list fastest.
template <typename Add>
void Combine(const Lists& lists, Add add) {
  for (const std::string& profile : lists.profiles) {
    for (const uint64_t context : lists.contexts) {
      for (const uint64_t rows : lists.rows) {
        for (const uint64_t batch : lists.batches) {
          for (const uint64_t workers : lists.workers) {
            for (const double rate : lists.rates) {
              for (const std::string& transport : lists.transports) {
                add(BenchPoint{transport, ProfileOf(profile), static_cast<uint32_t>(batch),
                               static_cast<uint32_t>(rows), static_cast<uint32_t>(context),
                               static_cast<uint32_t>(workers), rate});
              }
            }
          }
        }
      }
    }
  }
}

void ReadLoad(const Arguments& arguments, OptionReader* reader, LoadOptions* load) {
  reader->Real("duration", 0.1, 86400, &load->duration_s);
  reader->Real("warmup", 0, 3600, &load->warmup_s);
  reader->Number("steps", 1, std::numeric_limits<uint64_t>::max(), &load->steps);
  reader->Number("seed", 0, std::numeric_limits<uint64_t>::max(), &load->seed);
  std::string kind = "poisson";
  reader->Choice("arrivals", {"poisson", "uniform"}, &kind);
  load->arrivals = kind == "uniform" ? ArrivalKind::kUniform : ArrivalKind::kPoisson;
  if (arguments.Has("steps") && arguments.Has("duration")) {
    reader->Fault("steps", arguments.Get("steps"), "given without --duration");
  }
  if (arguments.Has("arrivals") && !arguments.Has("rate")) {
    reader->Fault("arrivals", arguments.Get("arrivals"), "given with --rate");
  }
}

}  // namespace

std::string BenchPoint::Name() const {
  std::string name = absl::StrCat(transport, " ", v1::Profile_Name(profile).substr(8), " batch ",
                                  batch, " rows ", rows, " context ", context, ", ", concurrency,
                                  concurrency == 1 ? " worker" : " workers");
  if (rate_per_s > 0) absl::StrAppend(&name, ", ", rate_per_s, " steps/s");
  return name;
}

std::vector<Option> BenchOptionTable() {
  return {
      {"transport", "LIST", "inline, shm, ring-futex, ring-spin, all, or auto (default)",
       "auto,inline,shm,ring-futex,ring-spin,all"},
      {"concurrency", "LIST", "workers, each with a connection of its own (default 1)"},
      {"rate", "LIST", "steps a second: an open loop (default: closed loop)"},
      {"arrivals", "KIND", "of the open loop: poisson (default) or uniform", "poisson,uniform"},
      {"duration", "SECONDS", "measured time of a run (default 10)"},
      {"steps", "N", "measure N steps instead"},
      {"warmup", "SECONDS", "before it is measured (default 1)"},
      {"profile", "LIST", "expanded (default), absorbed, append-only, all",
       "expanded,absorbed,append-only,all"},
      {"batch", "LIST", "sequences of a step (default 1)"},
      {"rows", "LIST", "new rows of each sequence in a step (default 1: decode)"},
      {"context", "LIST", "rows of each sequence before the first step (default 1024)"},
      {"shared-context", "", "sequences are forks of one, sharing its pages"},
      {"grow", "", "steps commit their rows (default: dropped, so that the context stays)"},
      {"preset", "MODEL",
       "small (default: 16 heads, 4 layers), deepseek-v2-lite, deepseek-v3, kimi-k2",
       "small,deepseek-v2-lite,deepseek-v3,kimi-k2"},
      {"heads", "N", "instead of the preset's"},
      {"layers", "N", "instead of the preset's"},
      {"lora", "N", "latent part of a KV row (default 512)"},
      {"rope", "N", "rotated part of a KV row (default 64)"},
      {"nope", "N", "unrotated part of an expanded query head (default 128)"},
      {"v", "N", "expanded output head (default 128)"},
      {"query-precision", "P", "of expanded: default, bf16 or split"},
      {"page-size", "N", "rows a page (default 0: the server's choice)"},
      {"lse", "", "ask for the log-sum-exp of every row and head too"},
      {"output-dtype", "TYPE", "of o: bf16 (default) or f32", "bf16,f32"},
      {"touch", "", "write every input byte and read every output byte, as a model does"},
      {"spin-us", "N", "how long each side of ring-spin spins before it sleeps (default 100)"},
      {"seed", "N", "of arrivals and data (default 1)"},
      {"plot", "FILE", "write latency curves and time series as SVG"},
      {"quiet", "", "show no progress"},
  };
}

absl::StatusOr<BenchOptions> ReadBenchOptions(const Arguments& arguments) {
  const auto client = ClientOptionsOf(arguments);
  if (!client.ok()) return client.status();
  BenchOptions options;
  options.target = TargetOf(arguments);
  options.client = *client;
  options.client.renew_leases = true;
  OptionReader reader(arguments);
  ReadModel(arguments, &reader, &options.model);
  ReadLoad(arguments, &reader, &options.load);
  const Lists lists = ReadLists(arguments, &reader);
  std::string dtype = "bf16";
  reader.Choice("output-dtype", {"bf16", "f32"}, &dtype);
  options.o_dtype = dtype == "f32" ? v1::DTYPE_F32 : v1::DTYPE_BF16;
  reader.Number("spin-us", 1, 10'000'000, &options.spin_us);
  options.shared_context = arguments.Has("shared-context");
  options.grow = arguments.Has("grow");
  options.want_lse = arguments.Has("lse");
  options.touch = arguments.Has("touch");
  options.quiet = arguments.Has("quiet");
  options.plot_file = arguments.Get("plot");
  if (!reader.status().ok()) return reader.status();
  if (lists.Runs() > kMaxBenchRuns) {
    return absl::InvalidArgumentError(
        absl::StrCat("the lists combine to ", lists.Runs(), " runs, at most ", kMaxBenchRuns));
  }
  Combine(lists, [&](BenchPoint point) { options.points.push_back(std::move(point)); });
  return options;
}

}  // namespace mla::mlactl
