#include "client/mlactl/page_commands.h"

#include <unistd.h>

#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "client/cpp/client.h"
#include "client/cpp/pages_file.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/cli/progress.h"
#include "client/mlactl/text/units.h"
#include "nlohmann/json.hpp"

namespace mla::mlactl {
namespace {

constexpr char kGroup[] = "Rows of sequences";

absl::StatusOr<v1::SequenceInfo> FindSequence(client::Client* client, const std::string& text) {
  uint64_t id = 0;
  if (!absl::SimpleHexAtoi(text, &id)) {
    return absl::InvalidArgumentError(
        absl::StrCat("SEQUENCE: got \"", text, "\", must be an id as sequences shows it"));
  }
  MLA_ASSIGN_OR_RETURN(const auto found, client->GetSequences({id}, false));
  if (found.sequences_size() == 1) return found.sequences(0);
  return absl::NotFoundError(absl::StrCat("sequence ", text, " is not open"));
}

// Returns nullopt if no key file is named.
absl::StatusOr<std::optional<wire::MacKey>> KeyOf(const std::string& path) {
  if (path.empty()) return std::optional<wire::MacKey>();
  return client::ReadPagesKey(path);
}

constexpr char kKeyNotes[] =
    "--mac-key: a file of 32 bytes that its owner alone may read, as\n"
    "  (umask 077; head -c 32 /dev/urandom > rows.key)\n"
    "makes one. Reading the rows needs it, and finds whether anything was changed.\n";

// Shows on a terminal how many rows of a stream of parts have passed.
class RowsProgress {
 public:
  explicit RowsProgress(std::string phase) : phase_(std::move(phase)) {}

  void Note(const v1::PagesPart& part) {
    if (part.has_header()) {
      first_ = part.header().first_row();
      rows_ = part.header().rows();
    }
    bytes_ += part.chunk().payload().size();
    if (part.has_group()) passed_ = part.group().first_row() - first_;
    const double fraction =
        rows_ > 0 ? static_cast<double>(passed_) / static_cast<double>(rows_) : -1;
    progress_.Show(phase_, fraction, BytesForPeople(static_cast<double>(bytes_)));
  }
  uint64_t bytes() const { return bytes_; }
  // Ends the line, before other output.
  void Clear() { progress_.Clear(); }

 private:
  const std::string phase_;
  Progress progress_{stderr, isatty(fileno(stderr)) == 0};
  uint64_t first_ = 0, rows_ = 0, passed_ = 0, bytes_ = 0;
};

// Returns any bytes as a string of JSON, in ASCII; what is not UTF-8 is replaced.
std::string JsonText(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

struct ExportOptions {
  std::string sequence, file, key;
  uint64_t first_row = 0;
  uint64_t end_row = 0;  // 0: all
};

int Export(const CommonOptions& common, const ExportOptions& options) {
  const auto client = Connect(common);
  if (!client.ok()) return Fail(client.status());
  const auto info = FindSequence(client->get(), options.sequence);
  if (!info.ok()) return Fail(info.status());
  const auto key = KeyOf(options.key);
  if (!key.ok()) return Fail(key.status());
  auto file = client::PagesFileWriter::Create(options.file, *key);
  if (!file.ok()) return Fail(file.status());
  v1::ExportRequest request;
  request.set_sequence_id(info->sequence_id());
  request.set_expected_epoch(info->epoch());
  request.set_first_row(options.first_row);
  if (options.end_row > 0) request.set_end_row(options.end_row);
  v1::PagesHeader header;
  RowsProgress progress("export");
  absl::Status status = (*client)->ExportPages(request, [&](const v1::PagesPart& part) {
    if (part.has_header()) header = part.header();
    progress.Note(part);
    return (*file)->Add(part);
  });
  if (status.ok()) status = (*file)->Finish();
  progress.Clear();
  const uint64_t bytes = progress.bytes();
  if (!status.ok()) return Fail(status);
  return Emit(
      common,
      absl::StrFormat("{\"rows\": %d, \"bytes\": %d, \"file\": %s}\n", header.rows(), bytes,
                      JsonText(options.file)),
      absl::StrFormat("%d rows from %d on, %d bytes\n", header.rows(), header.first_row(), bytes));
}

struct ImportOptions {
  std::string model, file, sequence, client, key;
  uint32_t lease_ms = 0;
};

int Import(const CommonOptions& common, const ImportOptions& options) {
  const auto client = Connect(common);
  if (!client.ok()) return Fail(client.status());
  const auto key = KeyOf(options.key);
  if (!key.ok()) return Fail(key.status());
  auto file = client::PagesFileReader::Open(options.file, *key);
  if (!file.ok()) return Fail(file.status());
  v1::ImportTarget target;
  target.set_model_id(options.model);
  target.set_client_id(options.client);
  target.set_lease_ms(options.lease_ms);
  if (!options.sequence.empty()) {
    const auto info = FindSequence(client->get(), options.sequence);
    if (!info.ok()) return Fail(info.status());
    target.set_sequence_id(info->sequence_id());
    target.set_expected_epoch(info->epoch());
  }
  RowsProgress progress("import");
  auto sequence = (*client)->ImportPages(target, [&] {
    auto part = (*file)->Next();
    if (part.ok() && part->has_value()) progress.Note(**part);
    return part;
  });
  progress.Clear();
  if (!sequence.ok()) return Fail(sequence.status());
  sequence->Detach();
  return Emit(common,
              absl::StrFormat("{\"sequence_id\": \"%016x\", \"epoch\": %d, \"length\": %d}\n",
                              sequence->id(), sequence->epoch(), sequence->length()),
              absl::StrFormat("sequence %016x has %d rows\n", sequence->id(), sequence->length()));
}

std::string CheckpointsText(
    const google::protobuf::RepeatedPtrField<v1::CheckpointInfo>& checkpoints) {
  std::string text =
      absl::StrFormat("%-16s %8s %10s %14s %s\n", "sequence", "epoch", "length", "bytes", "model");
  for (const v1::CheckpointInfo& one : checkpoints) {
    absl::StrAppendFormat(&text, "%016x %8d %10d %14d %s\n", one.sequence_id(), one.epoch(),
                          one.length(), one.bytes(),
                          one.length() == 0 ? "(damaged)" : one.model_id());
  }
  return text;
}

// Makes a command that takes the ids of sequences.
template <typename Call>
void AddOfIds(Program* program, const CommandText& text, Call call) {
  const auto ids = std::make_shared<std::vector<uint64_t>>();
  const auto words = std::make_shared<std::string>();
  Command command = program->Add(text);
  command.Word("SEQUENCES", "ids as sequences shows them, separated by commas", words.get());
  command.Run([ids, words, call](const CommonOptions& common) {
    for (const absl::string_view part : absl::StrSplit(*words, ',', absl::SkipEmpty())) {
      uint64_t id = 0;
      if (!absl::SimpleHexAtoi(part, &id)) {
        return FailUsage(absl::InvalidArgumentError(
            absl::StrCat("SEQUENCES: got \"", part, "\", must be ids as sequences shows them")));
      }
      ids->push_back(id);
    }
    return call(common, *ids);
  });
}

int Restore(const CommonOptions& common, const std::vector<uint64_t>& ids) {
  const auto client = Connect(common);
  if (!client.ok()) return Fail(client.status());
  auto sequences = (*client)->Restore(ids);
  if (!sequences.ok()) return Fail(sequences.status());
  std::string text, json;
  for (client::Sequence& sequence : *sequences) {
    absl::StrAppendFormat(&text, "sequence %016x has %d rows\n", sequence.id(), sequence.length());
    absl::StrAppendFormat(&json, "%s{\"sequence_id\": \"%016x\", \"epoch\": %d, \"length\": %d}",
                          json.empty() ? "" : ", ", sequence.id(), sequence.epoch(),
                          sequence.length());
    sequence.Detach();
  }
  return Emit(common, absl::StrCat("[", json, "]\n"), text);
}

void AddCheckpointCommands(Program* program) {
  AddOfIds(
      program,
      {.name = "checkpoint",
       .group = kGroup,
       .summary = "write sequences to the server's disk, for a restart",
       .examples = "mlactl checkpoint 5f3c9a0012d4e6b7\n"},
      [](const CommonOptions& common, const std::vector<uint64_t>& ids) {
        return CallAndPrint(
            common, [&](client::Client* client) { return client->Checkpoint(ids); },
            [](const v1::CheckpointReply& reply) { return CheckpointsText(reply.checkpoints()); });
      });
  AddOfIds(program,
           {.name = "restore",
            .group = kGroup,
            .summary = "open checkpointed sequences again",
            .examples = "mlactl restore 5f3c9a0012d4e6b7\n"},
           Restore);
  AddOfIds(program,
           {.name = "drop-checkpoints",
            .group = kGroup,
            .summary = "remove checkpoints from the server's disk",
            .examples = "mlactl drop-checkpoints 5f3c9a0012d4e6b7\n"},
           [](const CommonOptions& common, const std::vector<uint64_t>& ids) {
             return CallAndPrint(
                 common, [&](client::Client* client) { return client->DropCheckpoints(ids); },
                 [](const v1::DropCheckpointsReply& reply) {
                   return absl::StrCat(reply.dropped(), " dropped, ", reply.not_found_size(),
                                       " not found\n");
                 });
           });
  program
      ->Add({.name = "checkpoints",
             .group = kGroup,
             .summary = "list the tenant's checkpoints on the server's disk",
             .examples = "mlactl checkpoints --json\n"})
      .Run([](const CommonOptions& common) {
        return CallAndPrint(
            common, [](client::Client* client) { return client->ListCheckpoints(); },
            [](const v1::ListCheckpointsReply& reply) {
              return CheckpointsText(reply.checkpoints());
            });
      });
}

std::string KindName(v1::CacheEventKind kind) {
  const std::string name = v1::CacheEventKind_Name(kind);
  return name.empty() ? absl::StrCat("kind ", static_cast<int>(kind))
                      : absl::AsciiStrToLower(absl::StripPrefix(name, "CACHE_EVENT_KIND_"));
}

// Returns the model's name, after the tenant's name if events of all tenants are shown.
std::string ModelName(const std::string& tenant, const std::string& model) {
  return tenant.empty() ? model : absl::StrCat(tenant, "/", model);
}

std::string EventText(const v1::CacheEvent& event) {
  std::string text = absl::StrFormat("%d %-8s %s", event.number(), KindName(event.kind()),
                                     ModelName(event.tenant(), event.model_id()));
  if (event.sequence_id() != 0)
    absl::StrAppendFormat(&text, " sequence %016x", event.sequence_id());
  if (event.rows() > 0) absl::StrAppendFormat(&text, " rows %d", event.rows());
  if (event.sequence_id() != 0 && event.first_row() > 0) {
    absl::StrAppendFormat(&text, " from %d", event.first_row());
  }
  if (!event.key().empty()) absl::StrAppend(&text, " page ", absl::BytesToHexString(event.key()));
  if (!event.parent().empty()) {
    absl::StrAppend(&text, " after ", absl::BytesToHexString(event.parent()));
  }
  if (event.tier() == v1::CACHE_TIER_HOST) absl::StrAppend(&text, " of host memory");
  if (event.tier() == v1::CACHE_TIER_FILE) absl::StrAppend(&text, " of the file");
  return text + "\n";
}

struct EventsOptions {
  uint64_t after = 0;
  bool all = false;
  bool all_tenants = false;
  uint64_t count = 0;  // 0: no end
};

int Events(const CommonOptions& common, const EventsOptions& options) {
  const auto client = Connect(common);
  if (!client.ok()) return Fail(client.status());
  std::optional<uint64_t> after;
  if (options.all || options.after > 0) after = options.after;
  uint64_t seen = 0;
  std::map<std::string, uint64_t> last = {{"", options.after}};  // by tenant
  const auto take = [&](const v1::WatchEventsReply& reply) {
    for (const v1::CacheEvent& event : reply.events()) {
      uint64_t& before = last[event.tenant()];
      if (before != 0 && event.number() != before + 1) {
        std::fputs("(events are missing)\n", stderr);
      }
      before = event.number();
      const std::string line =
          common.json ? absl::StrReplaceAll(ToJson(event), {{"\n ", " "}, {"\n}", "}"}})
                      : EventText(WithPlainTexts(event));
      Print(line);
      std::fflush(stdout);
      if (++seen == options.count) return false;
    }
    return true;
  };
  const absl::Status status = (*client)->WatchEvents(after, take, options.all_tenants);
  return status.ok() ? kOk : Fail(status);
}

const char* WhyMissed(v1::MatchEnd end) {
  switch (end) {
    case v1::MATCH_END_ABSENT:
      return "absent: the rows that follow were never published here under this model and salt";
    case v1::MATCH_END_DIVERGED:
      return "diverged: what is known goes on with other tokens";
    case v1::MATCH_END_EVICTED:
      return "evicted: the rows that follow were there, and the pool has no room for them";
    case v1::MATCH_END_DEFERRED:
      return "deferred: the rows that follow were on their way back from a slower tier";
    default:
      return "unknown";
  }
}

std::string MissesText(const v1::ExplainReply& reply) {
  std::string text = absl::StrFormat("%-20s %-16s %8s %8s %8s  %s\n", "time", "sequence", "from",
                                     "asked", "found", "why, model");
  for (const v1::CacheMiss& miss : reply.misses()) {
    const absl::Time at = absl::FromUnixMillis(static_cast<int64_t>(miss.unix_ms()));
    absl::StrAppendFormat(&text, "%-20s %016x %8d %8d %8d  %s, %s\n",
                          absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", at, absl::UTCTimeZone()),
                          miss.sequence_id(), miss.first_row(), miss.rows_asked(),
                          miss.rows_found(), WhyMissed(miss.end()),
                          ModelName(miss.tenant(), miss.model_id()));
  }
  return text;
}

void AddEventCommands(Program* program) {
  const auto options = std::make_shared<EventsOptions>();
  Command events = program->Add({.name = "events",
                                 .group = kGroup,
                                 .summary = "show events of cached rows, until Ctrl-C",
                                 .examples = "mlactl events --all\nmlactl events --json\n"});
  events.Flag("all", "begin with the oldest event that is kept", &options->all);
  events.Flag("all-tenants", "show all tenants, for operators; not with --after",
              &options->all_tenants);
  events.Number({"after", "N", "begin after event N"}, 1, UINT64_MAX, &options->after);
  events.Number({"count", "N", "end after N events"}, 1, UINT64_MAX, &options->count);
  events.Run([options](const CommonOptions& common) { return Events(common, *options); });
  struct ExplainOptions {
    uint32_t limit = 20;
    bool all_tenants = false;
  };
  const auto shown = std::make_shared<ExplainOptions>();
  Command explain =
      program->Add({.name = "explain",
                    .group = kGroup,
                    .summary = "show why the latest matches did not find all rows",
                    .examples = "mlactl explain\nmlactl explain --most=100 --json\n"});
  explain.Number({"most", "N", "misses, the latest first (default 20)"}, 1, 8192, &shown->limit);
  explain.Flag("all-tenants", "show all tenants, for operators", &shown->all_tenants);
  explain.Run([shown](const CommonOptions& common) {
    return CallAndPrint(
        common,
        [shown](client::Client* client) {
          return client->Explain(shown->limit, shown->all_tenants);
        },
        MissesText);
  });
}

}  // namespace

void AddPageCommands(Program* program) {
  AddEventCommands(program);
  AddCheckpointCommands(program);
  const auto out = std::make_shared<ExportOptions>();
  Command write = program->Add(
      {.name = "export",
       .group = kGroup,
       .summary = "write rows of a sequence to a file",
       .examples = "mlactl export 5f3c9a0012d4e6b7 rows.mlapages\n",
       .notes = absl::StrCat("The file is complete or not there at all.\n", kKeyNotes)});
  write.Word("SEQUENCE", "its id, as sequences shows it", &out->sequence);
  write.Word("FILE", "the file to write", &out->file);
  write.Number({"first-row", "N", "first row, which begins a page (default 0)"}, 0, UINT64_MAX,
               &out->first_row);
  write.Number({"end-row", "N", "end of the rows, which is left out (default: all committed rows)"},
               1, UINT64_MAX, &out->end_row);
  write.Text({"mac-key", "FILE", "key of MACs that go with the rows (default: none)"}, &out->key);
  write.Run([out](const CommonOptions& common) { return Export(common, *out); });

  const auto in = std::make_shared<ImportOptions>();
  Command read =
      program->Add({.name = "import",
                    .group = kGroup,
                    .summary = "add rows of a file to a new sequence, or after another's rows",
                    .examples = "mlactl import deepseek-v3 rows.mlapages\n",
                    .notes = "The sequence stays for its lease: renew that to go on "
                             "with it.\n"});
  read.Word("MODEL", "the model of the rows", &in->model);
  read.Word("FILE", "the file, as export wrote it", &in->file);
  read.Text({"sequence", "ID", "sequence that the rows continue (default: a new one)"},
            &in->sequence);
  read.Text({"mac-key", "FILE", "key that the file was written with (default: none)"}, &in->key);
  read.Text({"client", "ID", "owner of a new sequence"}, &in->client);
  read.Number({"lease-ms", "N", "lease of a new sequence (default 0: the server's)"}, 0, UINT32_MAX,
              &in->lease_ms);
  read.Run([in](const CommonOptions& common) { return Import(common, *in); });
}

}  // namespace mla::mlactl
