// The required behaviour of the service, written independently of it: a list of rows per sequence
// and layer, attention over that list in double, and books of its own for pages, leases, steps and
// models. It shares no code with the product, and knows statuses only by their reason words.
//
// The oracle predicts. Check... functions return the reasons for which a call must be refused: any
// of them is right, and without reasons the call must be granted. Apply... functions change the
// books when the product has granted a call.
#ifndef MLA_TESTS_SIMULATION_ORACLE_ORACLE_H_
#define MLA_TESTS_SIMULATION_ORACLE_ORACLE_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace mla::simulation {

struct Shape {
  int heads = 0, lora = 0, rope = 0, nope = 0, v = 0;
  int layers = 0, page = 0;
  double scale = 0;
  int digest = 0;  // digest that a client has of the weights, or 0
  int row_dim() const { return lora + rope; }
  // A group holds a page of each layer, in granules of 256 bytes.
  int64_t group_bytes() const { return (int64_t{layers} * page * row_dim() * 2 + 255) / 256 * 256; }
  bool operator==(const Shape&) const = default;
};

enum class Form { kAbsorbed, kExpanded, kAppend };

// Reasons for which a call must be refused.
class Reasons {
 public:
  void Add(const char* reason) { words_.emplace_back(reason); }
  void AddIf(bool holds, const char* reason) {
    if (holds) Add(reason);
  }
  bool none() const { return words_.empty(); }
  bool Has(const std::string& word) const {
    return std::find(words_.begin(), words_.end(), word) != words_.end();
  }
  std::string Join() const {
    std::string all;
    for (const std::string& word : words_) all += (all.empty() ? "" : " or ") + word;
    return all.empty() ? "granted" : all;
  }

 private:
  std::vector<std::string> words_;
};

struct OracleLimits {
  int64_t pool_bytes = 0;
  int max_sequences = 0, max_sequence_rows = 0, max_pages = 0, max_models = 0;
  int max_step_rows = 0, max_step_sequences = 0, max_open_steps = 0, max_participants = 0;
  int64_t weights_bytes = 0;
  int64_t sequence_lease_ns = 0, step_lease_ns = 0, max_lease_ns = 0;
};

// Bounds of one tenant's resources.
struct OracleQuota {
  static constexpr int64_t kNone = int64_t{1} << 60;  // no bound
  int64_t kv_bytes = kNone, sequences = kNone, models = kNone, open_steps = kNone, queued = kNone;
};

// Resources of a tenant's models with equal contents together; for weights with a digest.
struct OracleContents {
  int tenant = 0;
  Shape shape;
  bool weights = false;
  uint64_t weights_key = 0;
  int groups = 0;  // groups in use, each counted once
};

struct OracleModel {
  int tenant = 0;
  std::string name;
  Shape shape;
  bool open = false;
  size_t contents = 0;
  int sequences = 0;
  int64_t lease_ns = 0, deadline = 0;  // 0: no lease
};

// Arguments of the call that opened a sequence under a request id.
struct OracleOrigin {
  std::string request_id;  // empty: none was given
  bool fork = false;
  std::string model, client;       // for Open
  uint64_t parent = 0, epoch = 0;  // for Fork
  int64_t length = -1;             // -1: not named
  bool operator==(const OracleOrigin&) const = default;
};

struct OracleSequence {
  uint64_t id = 0;
  int tenant = 0;
  int model = -1;
  uint64_t epoch = 1;
  uint64_t step = 0;     // 0: none
  bool imports = false;  // rows are being imported into it
  bool busy() const { return step != 0 || imports; }
  bool of_export = false;  // holds rows of an export, or is a fork of such a sequence; no client
                           // knows it
  std::vector<std::vector<uint64_t>> layers;  // keys of the committed rows
  std::vector<int> groups;                    // indices of page groups
  std::vector<uint64_t> pages;                // names of its first pages, as declared
  std::string salt;                           // salt that they were declared with
  int64_t lease_ns = 0, deadline = 0;
  OracleOrigin origin;
  uint64_t truncated_from = 0;  // epoch that the last Truncate named, or 0
  int64_t truncated_length = -1;
  int length() const { return static_cast<int>(layers[0].size()); }
};

struct OracleMember {
  uint64_t sequence = 0;
  int start = 0, rows = 0, offset = 0;
  int shared = -1;  // the group that the sequence replaces by a copy, or -1
};

struct OracleStep {
  uint64_t key = 0;  // unique; client ids are reused
  uint64_t id = 0;
  int tenant = 0;
  int model = -1;
  std::vector<uint64_t> streams;  // [0] began it
  int participants = 1;
  std::vector<OracleMember> members;
  int total = 0;
  std::vector<std::vector<uint64_t>> layers;  // keys of the accepted rows
  std::vector<int> writer;                    // head whose slice brings a layer's rows; -1: open
  std::vector<bool> broken;  // a row of the layer was given up, so nothing is predicted for it
  int64_t lease_ns = 0, touched = 0;
  int pending = 0;         // Attend requests not answered
  bool ending = false;     // its EndStep waits
  bool aborting = false;   // may be aborted now
  bool failed = false;     // a launch of it failed, so it must not be committed
  bool uncertain = false;  // the time of its last use is not known
};

struct OracleClosed {
  OracleStep step;
  bool aborted = false;  // else committed
};

// Arguments of a BeginStep.
struct OracleBegin {
  uint64_t stream = 0, id = 0;
  int tenant = 0;
  int model = -1;  // -1: a name that is not registered
  std::vector<uint64_t> sequences, epochs;
  std::vector<int> starts, rows;
  int participants = 1;
  int64_t lease_ns = 0;  // 0: the default
};

class Oracle {
 public:
  explicit Oracle(const OracleLimits& limits) : limits_(limits) {}

  // --- Values
  float Row(uint64_t key, int index, int tenant) const;
  // W_UK [nope, lora] and W_UV [lora, v] of a head.
  static uint16_t Weight(const OracleContents& contents, int layer, int head, bool value,
                         int index);
  // Attention of query row `row` of the step, one head, to the rows that it sees or, with `lists`,
  // to the rows that IsListed names under that key. `output` receives lora or v values; returns the
  // log-sum-exp.
  double Attend(const OracleStep& step, int layer, int row, Form form, int head, const float* query,
                uint64_t lists, std::vector<double>* output);

  // --- Models
  Reasons CheckRegister(int tenant, const std::string& name, const Shape& shape) const;
  int ApplyRegister(int tenant, const std::string& name, const Shape& shape, uint64_t weights_key,
                    int64_t lease_ns, int64_t now);
  void ApplyUnregister(int model) { models[model].open = false; }
  // A call has named the model, or a sequence of it has been released.
  void TouchModel(int model, int64_t now) { models[model].deadline = now + models[model].lease_ns; }
  Reasons CheckUnregister(int model) const;

  // --- Sequences
  Reasons CheckOpen(int tenant, int model) const;
  Reasons CheckFork(int tenant, uint64_t parent, uint64_t epoch, int64_t length) const;
  Reasons CheckTruncate(int tenant, uint64_t id, uint64_t epoch, int64_t length) const;
  // The sequence that the tenant has opened under a request id, or null if it does not exist.
  const OracleSequence* OpenedBy(int tenant, const std::string& request_id) const;
  // Returns true if Truncate was granted before with these arguments and would change nothing now.
  static bool IsRepeat(const OracleSequence& sequence, uint64_t epoch, int64_t length);
  void ApplyOpen(uint64_t id, int model, int64_t lease_ns, int64_t now);
  void ApplyFork(uint64_t id, uint64_t parent, int64_t length, int64_t lease_ns, int64_t now);
  void ApplyTruncate(uint64_t id, int64_t length, int64_t now);
  void ApplyRelease(uint64_t id, int64_t now);
  void Renew(OracleSequence* sequence, int64_t lease_ns, int64_t now);

  // --- Prefixes. Each declared page has a unique name, so the name determines its rows.
  struct Published {
    int model = -1;
    size_t contents = 0;  // contents of its model
    std::string salt;
    size_t index = 0;  // index of the page in its sequence
    int group = -1;
    std::vector<std::vector<uint64_t>> layers;  // keys of its rows
  };
  // Number of leading pages of these names that were published for the model, and so may be found.
  size_t MostFound(int model, const std::string& salt, const std::vector<uint64_t>& pages) const;
  // Number of those pages that another model of equal contents has published.
  int OfEquals(int model, const std::vector<uint64_t>& pages) const;
  Reasons CheckMatch(int tenant, uint64_t id, uint64_t epoch) const;
  // From now on the sequence's pages have these names; `found` more of them were found cached.
  void ApplyMatch(uint64_t id, const std::vector<uint64_t>& pages, const std::string& salt,
                  size_t found);

  // --- Export and import of rows
  // An export holds its rows by a fork (ApplyFork).
  Reasons CheckExport(int tenant, uint64_t id, uint64_t epoch, int64_t first, int64_t end) const;
  // `behind` is the sequence that gets the rows, or 0 for a new one of the model. `shape` is that
  // of the model that the rows come from. CheckPages checks whether there are pages.
  Reasons CheckImport(int tenant, int model, const Shape& shape, uint64_t behind, uint64_t epoch,
                      int64_t first, int64_t rows) const;
  // Reserves pages for the rows.
  void ApplyImport(uint64_t id, int64_t rows, int64_t now);
  // The rows have arrived, with these keys by layer.
  void EndImport(uint64_t id, const std::vector<std::vector<uint64_t>>& rows, int64_t now);
  void AbortImport(uint64_t id);

  // --- Steps
  Reasons CheckBegin(const OracleBegin& begin) const;
  void CheckPages(const OracleBegin& begin, Reasons* reasons) const;
  // Returns true if a refusal for lack of pages may be right although the bytes would suffice.
  bool PagesInDoubt(const OracleBegin& begin, int64_t groups_pinned) const;
  uint64_t ApplyBegin(const OracleBegin& begin, int64_t now);  // the step's key
  // Commits the given rows of each member.
  void ApplyEnd(OracleStep* step, const std::vector<int>& rows, int64_t now);
  void ApplyAbort(uint64_t key, int64_t now);
  OracleStep* FindStep(int tenant, uint64_t id);
  const OracleStep* FindStep(int tenant, uint64_t id) const;
  OracleStep* StepOf(uint64_t key);

  // Aborts steps that have been silent, then drops sequences whose lease has ended. Returns the
  // number of both.
  int PassTime(int64_t now);
  // Returns true if PassTime would abort a step.
  bool StepsOverdue(int64_t now) const;

  // --- Books
  int64_t groups_used() const { return groups_used_; }
  int64_t bytes_used() const { return bytes_used_; }
  int64_t expired() const { return expired_; }
  OracleSequence* Find(int tenant, uint64_t id);
  const OracleSequence* Find(int tenant, uint64_t id) const;
  int models_open() const;
  int64_t models_expired() const { return models_expired_; }
  // Held by a tenant.
  int64_t KvBytesOf(int tenant) const;
  int64_t SequencesOf(int tenant) const;
  int64_t ModelsOf(int tenant) const;
  int64_t StepsOf(int tenant) const;
  std::map<int, OracleQuota> quotas;  // by tenant

  // Sequences that a step has freed since the last check, by tenant and id.
  std::vector<std::pair<int, uint64_t>> freed_by_steps;

  // The steps that ended last.
  static constexpr size_t kClosedKept = 16;
  std::deque<OracleClosed> closed;

  bool draining = false;
  bool unhealthy = false;
  std::vector<OracleModel> models;
  std::vector<OracleContents> contents;
  OracleContents& ContentsOf(int model) { return contents[models[model].contents]; }
  const OracleContents& ContentsOf(int model) const { return contents[models[model].contents]; }
  std::map<uint64_t, OracleSequence> sequences;  // by id
  std::map<uint64_t, OracleStep> steps;          // by key

 private:
  int64_t GroupsWanted(const OracleBegin& begin) const;
  void CheckMember(const OracleBegin& begin, size_t index, Reasons* reasons) const;
  void Publish(const OracleSequence& sequence);
  void TakeGroup(OracleSequence* sequence);
  void DropGroup(OracleSequence* sequence);
  void ShareGroup(OracleSequence* sequence, int group);
  bool CopiesLastPage(const OracleSequence& sequence, int row) const;
  void EndCopy(const OracleMember& member, bool kept_rows);
  void ShrinkTo(OracleSequence* sequence, int rows);
  int PagesOf(const OracleSequence& sequence, int64_t rows) const;
  void Close(uint64_t key, bool aborted);

  const OracleLimits limits_;
  std::vector<int> holders_;  // by group
  std::vector<int> free_groups_;
  struct Copied {
    int steps = 0;  // open steps that copy it, and may return to it
    int rows = 0;   // most rows of its pages that one of them copies
  };
  std::map<int, Copied> copied_groups_;
  std::map<uint64_t, Published> published_;  // by name of the page
  std::set<int> published_groups_;           // numbers of groups that may still be cached; they are
                                             // not reused
  const OracleQuota& QuotaOf(int tenant) const;
  int64_t groups_used_ = 0, bytes_used_ = 0, expired_ = 0, models_expired_ = 0;
  uint64_t next_step_ = 1;
  std::vector<double> logits_, latent_query_, latent_;  // scratch of Attend
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_ORACLE_ORACLE_H_
