// Replaces the output of build_device_code.sh: no device code is built in.
#include <cstddef>

extern "C" {
extern const std::byte mla_probe_gfx950_begin[1], mla_probe_gfx942_begin[1],
    mla_probe_sm_90_begin[1];
const std::byte mla_probe_gfx950_begin[1] = {}, mla_probe_gfx942_begin[1] = {},
                mla_probe_sm_90_begin[1] = {};
extern const std::byte mla_probe_gfx950_end __attribute__((alias("mla_probe_gfx950_begin")));
extern const std::byte mla_probe_gfx942_end __attribute__((alias("mla_probe_gfx942_begin")));
extern const std::byte mla_probe_sm_90_end __attribute__((alias("mla_probe_sm_90_begin")));
}
