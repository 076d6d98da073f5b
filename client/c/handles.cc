#include <optional>

#include "client/c/handles.h"
#include "client/cpp/streams/errors.h"

struct mla_error {
  mla_code code = MLA_OK;
  std::string message;
  mla::v1::ErrorDetail detail;
};

namespace mla::capi {

absl::Status Refuse(std::string_view field, std::string_view limit, std::string_view got) {
  v1::ErrorDetail detail;
  detail.set_field(std::string(field));
  detail.set_limit(std::string(limit));
  detail.set_got(std::string(got));
  const std::string message =
      detail.field() + ": got " + detail.got() + ", must be " + detail.limit();
  return client::MakeStatus(static_cast<int32_t>(MLA_INVALID_ARGUMENT), message, detail);
}

absl::Status CheckNotNull(const void* pointer, std::string_view field) {
  return pointer == nullptr ? Refuse(field, "not NULL", "NULL") : absl::OkStatus();
}

mla_code Report(const absl::Status& status, mla_error** error) noexcept {
  if (error != nullptr) *error = nullptr;
  if (status.ok()) return MLA_OK;
  const auto code = static_cast<mla_code>(status.code());
  if (error == nullptr) return code;
  try {
    auto result = std::make_unique<mla_error>();
    result->code = code;
    result->message = std::string(status.message());
    result->detail = client::DetailOf(status).value_or(v1::ErrorDetail());
    *error = result.release();
  } catch (const std::exception&) {  // the code alone has to do
  }
  return code;
}

}  // namespace mla::capi

mla_code mla_error_code(const mla_error* error) { return error == nullptr ? MLA_OK : error->code; }

const char* mla_error_message(const mla_error* error) {
  return error == nullptr ? "" : error->message.c_str();
}

const char* mla_error_field(const mla_error* error) {
  return error == nullptr ? "" : error->detail.field().c_str();
}

const char* mla_error_limit(const mla_error* error) {
  return error == nullptr ? "" : error->detail.limit().c_str();
}

const char* mla_error_got(const mla_error* error) {
  return error == nullptr ? "" : error->detail.got().c_str();
}

const char* mla_error_reason(const mla_error* error) {
  return error == nullptr ? "" : error->detail.reason().c_str();
}

const char* mla_error_peer(const mla_error* error) {
  return error == nullptr ? "" : error->detail.peer().c_str();
}

uint32_t mla_error_retry_after_ms(const mla_error* error) {
  return error == nullptr ? 0 : error->detail.retry_after_ms();
}

uint64_t mla_error_last_good_position(const mla_error* error) {
  return error == nullptr ? 0 : error->detail.last_good_position();
}

int64_t mla_error_next_row(const mla_error* error) {
  return error != nullptr && error->detail.has_next_row() ? int64_t{error->detail.next_row()}
                                                          : int64_t{-1};
}

void mla_error_free(mla_error* error) { delete error; }
