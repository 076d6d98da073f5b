#include "client/mlactl/bench/bench_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace mla::mlactl {
namespace {

constexpr size_t kMaxList = 32;
constexpr char kProjected[] = "projected";

struct Preset {
  const char* name;
  uint32_t heads, layers;
  uint32_t q_lora, hidden;  // a model without low-rank queries makes them of hidden states
};
// All have latent rows of 512 + 64 elements, and heads of 128 + 64 -> 128.
constexpr Preset kPresets[] = {
    {"small", 16, 4, 512, 2048},
    {"deepseek-v2-lite", 16, 27, 2048, 2048},
    {"deepseek-v3", 128, 61, 1536, 7168},
    {"kimi-k2", 64, 61, 1536, 7168},
};

v1::Profile ProfileOf(const std::string& name) {
  if (name == "absorbed") return v1::PROFILE_ABSORBED;
  if (name == "append-only") return v1::PROFILE_APPEND_ONLY;
  if (name == kProjected) return v1::PROFILE_PROJECTED;
  return v1::PROFILE_EXPANDED;
}

v1::KvFormat KvFormatOf(const std::string& name) {
  if (name == "fp8_tensor") return v1::KV_FORMAT_FP8_TENSOR;
  if (name == "fp8_page") return v1::KV_FORMAT_FP8_PAGE;
  return name == "fp8_row" ? v1::KV_FORMAT_FP8_ROW : v1::KV_FORMAT_BF16;
}

v1::Fp8Compute Fp8ComputeOf(const std::string& name) {
  if (name == "off") return v1::FP8_COMPUTE_OFF;
  return name == "on" ? v1::FP8_COMPUTE_ON : v1::FP8_COMPUTE_AUTO;
}

v1::QueryPrecision PrecisionOf(const std::string& name) {
  if (name == "bf16") return v1::QUERY_PRECISION_BF16;
  if (name == "split") return v1::QUERY_PRECISION_SPLIT;
  return v1::QUERY_PRECISION_UNSPECIFIED;
}

bool Projects(const BenchArguments& arguments) {
  return std::find(arguments.profiles.begin(), arguments.profiles.end(), kProjected) !=
         arguments.profiles.end();
}

// Such a model takes queries of no other profile.
absl::Status CheckProjected(const BenchArguments& arguments) {
  if (!Projects(arguments)) {
    if (arguments.q_lora == 0 && arguments.hidden == 0 && arguments.projected_dtype.empty()) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        "--projected-dtype, --q-lora and --hidden go with --profile projected");
  }
  const bool others = std::any_of(
      arguments.profiles.begin(), arguments.profiles.end(),
      [](const std::string& name) { return name != kProjected && name != "append-only"; });
  if (others || arguments.attention != "dense" || arguments.query_dtype != "bf16" ||
      arguments.options.want_lse || arguments.rope % 2 != 0) {
    return absl::InvalidArgumentError(
        "--profile projected goes with append-only and no other profile, --attention dense, "
        "--q-dtype bf16 and an even --rope, and not with --lse");
  }
  return absl::OkStatus();
}

void AddProjections(const BenchArguments& arguments, const Preset& preset, v1::ModelSpec* model) {
  model->set_rope_owner(v1::ROPE_OWNER_SERVER);
  model->set_rope_layout(v1::ROPE_LAYOUT_INTERLEAVED);
  model->set_q_lora_rank(arguments.q_lora > 0 ? arguments.q_lora : preset.q_lora);
  model->set_hidden_size(arguments.hidden > 0 ? arguments.hidden : preset.hidden);
  model->set_projected_dtype(arguments.projected_dtype == "e4m3" ? v1::DTYPE_F8_E4M3
                                                                 : v1::DTYPE_BF16);
}

v1::ModelSpec ModelOf(const BenchArguments& arguments) {
  v1::ModelSpec model;
  v1::Geometry* const geometry = model.mutable_geometry();
  model.set_rope_owner(v1::ROPE_OWNER_WORKER);
  for (const Preset& preset : kPresets) {
    if (arguments.preset != preset.name) continue;
    geometry->set_num_heads(arguments.heads > 0 ? arguments.heads : preset.heads);
    model.set_layers(arguments.layers > 0 ? arguments.layers : preset.layers);
    if (Projects(arguments)) AddProjections(arguments, preset, &model);
  }
  const bool windowed = arguments.attention == "v4";
  geometry->set_kv_lora_rank(arguments.lora > 0 ? arguments.lora : windowed ? 448 : 512);
  geometry->set_rope_dim(arguments.rope);
  geometry->set_nope_dim(windowed ? 0 : arguments.nope);
  geometry->set_v_dim(windowed ? 0 : arguments.v);
  model.set_query_precision(PrecisionOf(arguments.query_precision));
  model.set_page_size(arguments.page_size);
  model.set_softmax_scale(1.0 / std::sqrt(static_cast<double>(arguments.nope + arguments.rope)));
  model.set_kv_format(KvFormatOf(arguments.kv_format));
  model.set_fp8_compute(Fp8ComputeOf(arguments.fp8_compute));
  if (arguments.attention == "v32") {
    model.set_attention(v1::ATTENTION_KIND_SPARSE_V32);
    model.set_top_k(arguments.top_k > 0 ? arguments.top_k : 2048);
  }
  if (windowed) {
    model.set_attention(v1::ATTENTION_KIND_SPARSE_V4);
    model.set_top_k(arguments.top_k > 0 ? arguments.top_k : 512);
    model.set_window(arguments.window);
    for (uint32_t layer = 0; layer < model.layers(); ++layer) model.add_ratios(arguments.ratio);
  }
  return model;
}

size_t Runs(const BenchArguments& arguments) {
  return arguments.transports.size() * arguments.profiles.size() * arguments.batches.size() *
         arguments.rows.size() * arguments.contexts.size() * arguments.workers.size() *
         arguments.rates.size();
}

// A scene must be a single run of the dense model with outputs.
absl::Status CheckScene(const BenchArguments& arguments) {
  const SceneOptions& scene = arguments.options.scene;
  if (scene.name.empty()) return absl::OkStatus();
  if (Runs(arguments) != 1) {
    return absl::InvalidArgumentError("--scene is one run: lists may have one value");
  }
  if (arguments.attention != "dense" || arguments.profiles[0] == "append-only" ||
      arguments.profiles[0] == kProjected) {
    return absl::InvalidArgumentError(
        "--scene goes with --attention dense, and --profile expanded or absorbed");
  }
  if (arguments.contexts[0] < 2 || arguments.contexts[0] > kMaxTraceRows) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--context: got ", arguments.contexts[0], ", must be 2..", kMaxTraceRows, " with --scene"));
  }
  if (scene.name == "agent-turn" && arguments.workers[0] != 1) {
    return absl::InvalidArgumentError("--scene=agent-turn goes with --concurrency 1");
  }
  return absl::OkStatus();
}

// Calls `add` with every combination; the last list changes fastest.
template <typename Add>
void Combine(const BenchArguments& arguments, Add add) {
  for (const std::string& profile : arguments.profiles) {
    for (const uint64_t context : arguments.contexts) {
      for (const uint64_t rows : arguments.rows) {
        for (const uint64_t batch : arguments.batches) {
          for (const uint64_t workers : arguments.workers) {
            for (const double rate : arguments.rates) {
              for (const std::string& transport : arguments.transports) {
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

// `scene`: if it is given, decode steps and their options are left out.
void AddLoad(Command* command, CLI::Option* scene, BenchArguments* arguments) {
  LoadOptions* const load = &arguments->options.load;
  command->Choices(
      {"transport", "LIST",
       "inline, shm, ring-futex, ring-spin, all these, ucx[-puts|-device], auto (default)"},
      TransportNames(), {"auto", kUcx, kUcxPuts, kUcxDevice}, &arguments->transports);
  command->Numbers(
      {"concurrency", "LIST", "workers, each with a connection of its own (default 1)"}, 1, 4096,
      kMaxList, &arguments->workers);
  CLI::Option* const rate =
      command
          ->Reals({"rate", "LIST", "steps a second: an open loop (default: closed loop)"}, 1e-3,
                  1e7, kMaxList, &arguments->rates)
          ->excludes(scene);
  command
      ->Real({"within-p99-ms", "MS", "find the highest rate whose steps' p99 is within this time"},
             1e-3, 1e7, &arguments->options.within_p99_ms)
      ->excludes(rate)
      ->excludes(scene);
  command
      ->Choice({"arrivals", "KIND", "arrivals of the open loop: poisson (default) or uniform"},
               {"poisson", "uniform"}, &arguments->arrivals)
      ->needs(rate);
  CLI::Option* const duration =
      command
          ->Real({"duration", "SECONDS", "measured time of a run (default 10)"}, 0.1, 86400,
                 &load->duration_s)
          ->excludes(scene);
  command
      ->Number({"steps", "N", "measure N steps instead"}, 1, std::numeric_limits<uint64_t>::max(),
               &load->steps)
      ->excludes(duration)
      ->excludes(scene);
  command
      ->Real({"warmup", "SECONDS", "time before the measurement (default 1)"}, 0, 3600,
             &load->warmup_s)
      ->excludes(scene);
}

void AddShape(Command* command, CLI::Option* scene, BenchArguments* arguments) {
  constexpr uint64_t kMost = 1u << 20;
  command->Choices({"profile", "LIST",
                    "expanded (default), absorbed, append-only, all (these three), projected"},
                   {"expanded", "absorbed", "append-only"}, {kProjected}, &arguments->profiles);
  command
      ->Numbers({"batch", "LIST", "sequences of a step (default 1)"}, 1, kMost, kMaxList,
                &arguments->batches)
      ->excludes(scene);
  command
      ->Numbers({"rows", "LIST", "new rows of each sequence in a step (default 1: decode)"}, 1,
                kMost, kMaxList, &arguments->rows)
      ->excludes(scene);
  command->Numbers({"context", "LIST",
                    "rows of each sequence before the first step (default 1024); of scenes, see "
                    "below"},
                   0, 1u << 30, kMaxList, &arguments->contexts);
  command
      ->Flag("shared-context", "sequences are forks of one, sharing its pages",
             &arguments->options.shared_context)
      ->excludes(scene);
  command
      ->Flag("grow", "steps commit their rows (default: dropped, so that the context stays)",
             &arguments->options.grow)
      ->excludes(scene);
}

CLI::Option* AddScene(Command* command, SceneOptions* scene) {
  constexpr uint64_t kMost = 1u << 20;
  CLI::Option* const name =
      command->Choice({"scene", "SCENE", "instead of decode steps: agents or agent-turn"},
                      {"agents", "agent-turn"}, &scene->name);
  AgentsShape* const shape = &scene->shape;
  const auto number = [&](const char* option, const char* help, uint64_t least, uint64_t most,
                          uint32_t* value) {
    command->Number({option, "N", help}, least, most, value)->needs(name);
  };
  number("conversations", "conversations of agents (default 8)", 1, kMost, &shape->conversations);
  number("turns", "turns of each conversation (default 43)", 1, 4096, &shape->turns);
  number("system", "rows that all conversations begin with (default 512)", 0, kMaxTraceRows,
         &shape->system);
  number("outputs", "outputs of each turn (default 4)", 1, 65536, &shape->output);
  number("branches", "branches of a conversation that has some (default 3)", 0, 4096,
         &shape->branches);
  command
      ->Real({"branching", "SHARE", "share of the conversations that have branches (default 0.44)"},
             0, 1, &shape->branching)
      ->needs(name);
  command
      ->Real({"pause-ms", "MS", "between turns, the mean (default 2000)"}, 0, 1e6, &shape->pause_ms)
      ->needs(name);
  command
      ->Real({"share", "SHARE", "share of agent-turn's rows that the cache has (default 0.96)"}, 0,
             0.999, &scene->share)
      ->needs(name);
  number("repeats", "repeats of agent-turn (default 3)", 1, 1000, &scene->repeats);
  number("prefill-rows", "rows of a step that computes an input (default 512)", 1, 65536,
         &scene->prefill_rows);
  command
      ->Real({"speed", "X", "speed of the trace's clock (default 0: no waits)"}, 0, 1e6,
             &scene->speed)
      ->needs(name);
  command->Text({"trace", "FILE", "run this trace"}, &scene->trace_file)->needs(name);
  command->Text({"save-trace", "FILE", "write the trace that is run"}, &scene->save_file)
      ->needs(name);
  return name;
}

void AddModel(Command* command, BenchArguments* arguments) {
  constexpr uint64_t kMost = 65536;
  std::vector<std::string> presets;
  for (const Preset& preset : kPresets) presets.emplace_back(preset.name);
  command->Choice({"preset", "MODEL",
                   "small (default: 16 heads, 4 layers), deepseek-v2-lite, deepseek-v3, kimi-k2"},
                  presets, &arguments->preset);
  command->Number({"heads", "N", "instead of the preset's"}, 1, kMost, &arguments->heads);
  command->Number({"layers", "N", "instead of the preset's"}, 1, kMost, &arguments->layers);
  command->Number({"lora", "N", "latent part of a KV row (default 512, with v4 448)"}, 1, kMost,
                  &arguments->lora);
  command->Number({"rope", "N", "rotated part of a KV row (default 64)"}, 1, kMost,
                  &arguments->rope);
  command->Number({"nope", "N", "unrotated part of an expanded query head (default 128)"}, 1, kMost,
                  &arguments->nope);
  command->Number({"v", "N", "expanded output head (default 128)"}, 1, kMost, &arguments->v);
  command->Number({"q-lora", "N", "low-rank queries of projected, instead of the preset's"}, 1,
                  kMost, &arguments->q_lora);
  command->Number({"hidden", "N", "hidden states of projected, instead of the preset's"}, 1, kMost,
                  &arguments->hidden);
  command->Choice({"projected-dtype", "TYPE",
                   "how the server holds the weights of projected: bf16 (default) or e4m3"},
                  {"bf16", "e4m3"}, &arguments->projected_dtype);
  command->Choice({"query-precision", "P", "precision of expanded queries: default, bf16 or split"},
                  {"default", "bf16", "split"}, &arguments->query_precision);
  command->Choice(
      {"kv-format", "F", "format of the cache: bf16 (default), fp8_tensor, fp8_row or fp8_page"},
      {"bf16", "fp8_tensor", "fp8_row", "fp8_page"}, &arguments->kv_format);
  command->Choice({"fp8-compute", "C",
                   "whether products over 8-bit rows are of 8 bits too: auto (default), off or on"},
                  {"auto", "off", "on"}, &arguments->fp8_compute);
  command->Choice(
      {"attention", "A",
       "dense (default), v32: random lists of --top-k rows, or v4: a window and entries"},
      {"dense", "v32", "v4"}, &arguments->attention);
  command->Number({"top-k", "N", "entries of a list (default 2048 of v32, 512 of v4)"}, 1, kMost,
                  &arguments->top_k);
  command->Number({"window", "N", "rows of v4's window (default 128)"}, 1, 4096,
                  &arguments->window);
  command->Number({"ratio", "N", "positions that an entry of v4 stands for (default 4)"}, 1, 4096,
                  &arguments->ratio);
  command->Number({"page-size", "N", "rows a page (default 0: the server's choice)"}, 0, kMost,
                  &arguments->page_size);
}

}  // namespace

std::string BenchPoint::Name() const {
  std::string name = absl::StrCat(transport, " ", v1::Profile_Name(profile).substr(8), " batch ",
                                  batch, " rows ", rows, " context ", context, ", ", concurrency,
                                  concurrency == 1 ? " worker" : " workers");
  if (rate_per_s > 0) absl::StrAppend(&name, ", ", rate_per_s, " steps/s");
  return name;
}

void AddBenchOptions(Command* command, BenchArguments* arguments) {
  BenchOptions* const options = &arguments->options;
  CLI::Option* const scene = AddScene(command, &options->scene);
  AddLoad(command, scene, arguments);
  AddShape(command, scene, arguments);
  AddModel(command, arguments);
  command->Flag("lse", "request the log-sum-exp of every row and head too", &options->want_lse)
      ->excludes(scene);
  command
      ->Choice({"q-dtype", "TYPE", "type of q as sent: bf16 (default) or e4m3"}, {"bf16", "e4m3"},
               &arguments->query_dtype)
      ->excludes(scene);
  command
      ->Choice({"kv-row-dtype", "TYPE", "type of KV rows as sent: bf16 (default) or e4m3"},
               {"bf16", "e4m3"}, &arguments->row_dtype)
      ->excludes(scene);
  command
      ->Choice({"output-dtype", "TYPE", "type of o: bf16 (default) or f32"}, {"bf16", "f32"},
               &arguments->output_dtype)
      ->excludes(scene);
  command
      ->Flag("touch", "write every input byte and read every output byte, as a model does",
             &options->touch)
      ->excludes(scene);
  AddSpin(command, &options->spin_us);
  command->Number({"seed", "N", "seed of arrivals and data (default 1)"}, 0,
                  std::numeric_limits<uint64_t>::max(), &options->load.seed);
  command->Text({"plot", "FILE", "draw latency curves and time series: .svg, .png or .pdf"},
                &options->plot_file);
  command->Flag("quiet", "show no progress", &options->quiet);
}

absl::StatusOr<BenchOptions> MakeBenchOptions(const CommonOptions& common,
                                              const BenchArguments& arguments) {
  if (const size_t runs = Runs(arguments); runs > kMaxBenchRuns) {
    return absl::InvalidArgumentError(
        absl::StrCat("the lists combine to ", runs, " runs, at most ", kMaxBenchRuns));
  }
  if (absl::Status status = CheckScene(arguments); !status.ok()) return status;
  if (absl::Status status = CheckProjected(arguments); !status.ok()) return status;
  BenchOptions options = arguments.options;
  options.target = common.target;
  options.client = common.client;
  options.client.renew_leases = true;
  options.model = ModelOf(arguments);
  options.load.arrivals =
      arguments.arrivals == "uniform" ? ArrivalKind::kUniform : ArrivalKind::kPoisson;
  const auto sent = [](const std::string& name) {
    return name == "e4m3" ? v1::DTYPE_F8_E4M3 : v1::DTYPE_BF16;
  };
  options.q_dtype = sent(arguments.query_dtype);
  options.kv_row_dtype = sent(arguments.row_dtype);
  options.o_dtype = arguments.output_dtype == "f32" ? v1::DTYPE_F32 : v1::DTYPE_BF16;
  if (arguments.attention == "v4" &&
      (options.kv_row_dtype != v1::DTYPE_BF16 ||
       std::find(arguments.profiles.begin(), arguments.profiles.end(), "expanded") !=
           arguments.profiles.end())) {
    return absl::InvalidArgumentError(
        "--attention v4 goes with --profile absorbed or append-only, and --kv-row-dtype bf16");
  }
  Combine(arguments, [&](BenchPoint point) { options.points.push_back(std::move(point)); });
  return options;
}

}  // namespace mla::mlactl
