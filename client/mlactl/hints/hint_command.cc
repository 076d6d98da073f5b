#include "client/mlactl/hints/hint_command.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "client/cpp/client.h"
#include "client/mlactl/cli/output.h"

namespace mla::mlactl {
namespace {

struct HintOptions {
  std::string kind, sequence, model, tokens, salt;
  uint32_t ttl_ms = 60'000;
  uint32_t priority = 1;
};

absl::StatusOr<v1::HintRequest> RequestOf(client::Client* client, const HintOptions& options) {
  v1::HintRequest request;
  v1::HintKind kind = v1::HINT_KIND_UNSPECIFIED;
  const std::string name = absl::StrCat("HINT_KIND_", absl::AsciiStrToUpper(options.kind));
  if (!v1::HintKind_Parse(name, &kind) || kind == v1::HINT_KIND_UNSPECIFIED) {
    return absl::InvalidArgumentError(
        absl::StrCat("KIND: got \"", options.kind, "\", must be pin, retain, prefetch or demote"));
  }
  request.set_kind(kind);
  if (kind == v1::HINT_KIND_PIN) request.set_ttl_ms(options.ttl_ms);
  if (kind == v1::HINT_KIND_RETAIN) request.set_priority(options.priority);
  if (options.sequence.empty() == options.model.empty()) {
    return absl::InvalidArgumentError("one of --sequence and --model must name the rows");
  }
  if (!options.sequence.empty()) {
    uint64_t id = 0;
    if (!absl::SimpleHexAtoi(options.sequence, &id)) {
      return absl::InvalidArgumentError(absl::StrCat("--sequence: got \"", options.sequence,
                                                     "\", must be an id as sequences shows it"));
    }
    MLA_ASSIGN_OR_RETURN(const auto found, client->GetSequences({id}, false));
    request.set_sequence_id(id);
    if (found.sequences_size() == 1) request.set_expected_epoch(found.sequences(0).epoch());
    return request;
  }
  request.set_model_id(options.model);
  request.mutable_prefix()->set_salt(options.salt);
  for (const absl::string_view text : absl::StrSplit(options.tokens, ',', absl::SkipEmpty())) {
    uint32_t token = 0;
    if (!absl::SimpleAtoi(text, &token)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--tokens: got \"", text, "\", must be token ids between commas"));
    }
    request.mutable_prefix()->add_token_ids(token);
  }
  return request;
}

std::string AnswerText(const v1::HintReply& reply) {
  std::string outcome(absl::StripPrefix(v1::HintOutcome_Name(reply.outcome()), "HINT_OUTCOME_"));
  absl::AsciiStrToLower(&outcome);
  std::string text = absl::StrFormat("%s: %d of %d rows", outcome, reply.rows_done(), reply.rows());
  if (reply.rows_deferred() > 0) {
    absl::StrAppendFormat(&text, ", %d on their way", reply.rows_deferred());
  }
  if (!reply.reason().empty()) absl::StrAppend(&text, " (", reply.reason(), ")");
  return text + "\n";
}

}  // namespace

void AddHintCommand(Program* program) {
  const auto options = std::make_shared<HintOptions>();
  Command hint = program->Add(
      {.name = "hint",
       .group = "Rows of sequences",
       .summary = "keep cached rows in the pool, bring them back, or let them go",
       .examples = "mlactl hint pin --sequence=5f3c9a0012d4e6b7 --ttl-ms=60000\n"
                   "mlactl hint prefetch --model=chat --tokens=1,15043,3186\n",
       .notes = "pin: they stay in the pool for --ttl-ms, 0: no more. retain: they go later than "
                "others.\nprefetch: they come back from slower tiers. demote: they go there.\n"});
  hint.Word("KIND", "pin, retain, prefetch or demote", &options->kind);
  hint.Text({"sequence", "ID", "the sequence with the rows, which it has declared"},
            &options->sequence);
  hint.Text({"model", "ID", "the model of --tokens, which begin a text"}, &options->model);
  hint.Text({"tokens", "T,T,...", "token ids, with --model"}, &options->tokens);
  hint.Text({"salt", "TEXT", "salt of these rows (default: none)"}, &options->salt);
  hint.Number({"ttl-ms", "N", "time that pin keeps them (default 60000)"}, 0, UINT32_MAX,
              &options->ttl_ms);
  hint.Number({"priority", "N", "priority of retain, 0 to 3 (default 1)"}, 0, 3,
              &options->priority);
  hint.Run([options](const CommonOptions& common) {
    return CallAndPrint(
        common,
        [options](client::Client* client) -> absl::StatusOr<v1::HintReply> {
          MLA_ASSIGN_OR_RETURN(const auto request, RequestOf(client, *options));
          return client->Hint(request);
        },
        AnswerText);
  });
}

}  // namespace mla::mlactl
