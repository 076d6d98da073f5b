// Each tenant's share of the resources that the server's side counts (staged bytes, streams,
// uploads, regions, control calls), the rows of the tenant table, and the tenants' bounds. Like the
// oracle, it is written independently of the product.
#ifndef MLA_TESTS_SIMULATION_ORACLE_TENANT_BOOKS_H_
#define MLA_TESTS_SIMULATION_ORACLE_TENANT_BOOKS_H_

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace mla::simulation {

class TenantBooks {
 public:
  static constexpr int kResources = 6;
  // The product's name of a resource; and whether it is counted in bytes.
  static const char* Name(int resource);
  static bool InBytes(int resource);

  template <typename T>
  using Each = std::array<T, kResources>;
  struct Quota {
    Each<std::optional<int64_t>> bounds;
    std::optional<int> weight;
    bool others = false;  // it also bounds resources that are not counted here
    bool empty() const;
  };
  struct Row {
    uint64_t key = 0;
    int references = 0;
    Each<int64_t> used = {};
    Each<uint64_t> refused = {};
    bool idle() const;
  };

  TenantBooks(size_t most_tenants, const Each<int64_t>& server, const Each<int64_t>& defaults)
      : most_tenants_(most_tenants), server_(server), defaults_(defaults) {}

  // Makes room for a tenant without a row, as a call in its name does. Returns false if there is
  // none.
  bool MakeRoomFor(const std::string& name);
  // The tenant's row has this key. Returns "" or why that cannot be.
  std::string Entered(const std::string& name, uint64_t key);
  Row* Find(const std::string& name);
  size_t rows() const { return rows_.size(); }

  // Returns true if `amount` more is granted; `reserve` is allowed in addition to the bounds.
  bool MayTake(const std::string& name, int resource, int64_t amount, int64_t reserve) const;
  // The bound that a refusal names.
  int64_t Bound(const std::string& name, int resource) const;
  int64_t ServerBound(int resource) const { return server_[resource]; }
  int64_t ServerUsed(int resource) const;
  int Weight(const std::string& name) const;

  void Configure(const std::string& name, const Quota& quota) { configured_[name] = quota; }
  bool MaySetQuota(const std::string& name) const;
  void SetQuota(const std::string& name, const Quota& quota, bool reset);

 private:
  const size_t most_tenants_;
  const Each<int64_t> server_, defaults_;
  std::map<std::string, Row> rows_;
  std::map<std::string, Quota> configured_, runtime_;
  uint64_t last_key_ = 0;
};

}  // namespace mla::simulation

#endif  // MLA_TESTS_SIMULATION_ORACLE_TENANT_BOOKS_H_
