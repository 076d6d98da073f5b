// The two ways to hand a failure to the caller.
#ifndef MLA_BASE_STATUS_MACROS_H_
#define MLA_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns the status if it is not OK.
#define MLA_RETURN_IF_ERROR(expression)                                     \
  do {                                                                      \
    if (absl::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

// Assigns the value of a StatusOr to `place`, which may be a declaration, or returns its status.
#define MLA_ASSIGN_OR_RETURN(place, ...) \
  MLA_ASSIGN_OR_RETURN_(MLA_NAME_OF_LINE_(value_or_, __LINE__), place, (__VA_ARGS__))
#define MLA_ASSIGN_OR_RETURN_(value_or, place, expression) \
  auto value_or = expression;                              \
  if (!value_or.ok()) return std::move(value_or).status(); \
  place = *std::move(value_or)
#define MLA_NAME_OF_LINE_(name, line) MLA_JOIN_(name, line)
#define MLA_JOIN_(a, b) a##b

#endif  // MLA_BASE_STATUS_MACROS_H_
