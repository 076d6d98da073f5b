// Adds the projections around the absorbed form to a launch: queries into the latent space
// (absorb), and latent outputs out of it (project).
//
// Ownership: borrows the device's state; owns scratch memory only. Threading: as the backend's
// launches, one thread at a time. Nothing is allocated after the constructor.
#ifndef MLA_KERNELS_HIP_LAUNCH_PROJECT_WORK_H_
#define MLA_KERNELS_HIP_LAUNCH_PROJECT_WORK_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/args/kernel_args.h"
#include "kernels/hip/device_state/device_state.h"
#include "kernels/hip/slot/launch_recording.h"

namespace mla::kernels::hip {

class ProjectWork final {
 public:
  ProjectWork(const DeviceState& device, const BackendLimits& limits);

  // Returns the most bytes of metadata that a launch takes here.
  static int64_t MetadataBytes(const BackendLimits& limits);

  // Returns true if the kernel of this projection reads only its weights and records until the
  // kernels before it, a gate included, have ended.
  bool StartsEarly(const Projection& projection) const;

  // Return FAILED_PRECONDITION for heads without weights, RESOURCE_EXHAUSTED beyond the limits.
  absl::Status AddAbsorb(LaunchRecording& recording, const Projection& projection);
  absl::Status AddProject(LaunchRecording& recording, const Projection& projection);

 private:
  absl::Status Check(const char* verb, std::span<const ProjectionRecord> records) const;
  // `args` lacks the fields that follow from `projection`: weights, dtypes and records. `absorbs`
  // selects W_UK.
  absl::Status AddChecked(LaunchRecording& recording, bool absorbs, const Projection& projection,
                          ProjectArgs args);
  // `args` lacks the weights, and the rows and tiles, which are made from `records`.
  absl::Status Add(LaunchRecording& recording, std::span<const ProjectionRecord> records,
                   bool absorbs, const ProjectArgs& args);

  const DeviceState& device_;
  // This is scratch memory, whose capacity follows from the limits.
  std::vector<ProjectTile> tiles_;
  std::vector<ProjectRow> rows_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_LAUNCH_PROJECT_WORK_H_
