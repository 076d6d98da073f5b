// The transports' use of the tenant table, without transports. Tenants come, take staging memory,
// streams, uploads, regions and control calls, return them in any order, and go. Operators change
// their quotas at the same time. More tenants than the table has rows take turns. TenantBooks
// checks the results.
#ifndef MLA_TESTS_SIMULATION_TENANTS_TENANT_CALLS_H_
#define MLA_TESTS_SIMULATION_TENANTS_TENANT_CALLS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "scheduler/tenant_table.h"
#include "tests/simulation/oracle/tenant_books.h"

namespace mla::simulation {

class TenantCalls {
 public:
  using Pick = std::function<uint64_t(uint64_t below)>;

  // Draws the bounds; Options is for an engine whose limits.max_tenants is `most_tenants`.
  TenantCalls(size_t most_tenants, Pick pick);
  void AddTo(scheduler::TenantTableOptions* options) const;
  // Call it first; the table outlives this.
  void Start(scheduler::TenantTable* table);

  // Runs one operation; returns false if there was nothing to do. `violation` receives a violation.
  bool Do(std::string* violation);
  // Returns everything.
  void Finish(std::string* violation);

  // Adds a tenant whose row others keep for good.
  void Keep(const std::string& name, scheduler::TenantRef row, std::string* violation);
  // Quotas of the engine's resources are about to be set; the tenant's other quotas are dropped.
  // Returns false if the table has no room for another.
  bool SetOtherQuota(const std::string& name);
  int64_t refusals() const { return refusals_; }

 private:
  struct Holding {
    std::string name;
    scheduler::Tenant* tenant = nullptr;  // kept by the table while it holds something
    int resource = 0;
    int64_t amount = 0;
  };
  struct Guest {
    std::string name;
    scheduler::TenantRef row;
    bool kept = false;
  };

  bool Chance(int percent) { return pick_(100) < static_cast<uint64_t>(percent); }
  static scheduler::Resource ResourceOf(int resource);
  TenantBooks::Quota DrawQuota();
  static scheduler::TenantQuota QuotaOf(const TenantBooks::Quota& quota);
  void Enter();
  bool Leave();
  bool Take();
  bool Return();
  void ReturnPart(size_t index, int64_t amount);
  void SetQuota();
  void CheckRefusal(const Holding& wanted, const absl::Status& status);
  void Check(const std::string& name);
  void Fail(const std::string& what) {
    if (violation_.empty()) violation_ = what;
  }

  const Pick pick_;
  TenantBooks::Each<int64_t> server_, defaults_;
  TenantBooks::Quota configured_;
  TenantBooks books_;
  scheduler::TenantTable* table_ = nullptr;
  std::vector<Guest> guests_;
  std::vector<Holding> holdings_;
  int64_t refusals_ = 0;
  std::string violation_;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_TENANTS_TENANT_CALLS_H_
