"""Flags of device code on the host, whose speed decides how long its tests take."""

# AVX2, without sums that round once where the device rounds twice. The address of the lane is read
# at every instruction, which descriptors make cheap.
HOST_COPTS = [
    "-ffp-contract=off",
] + select({
    "@platforms//cpu:x86_64": [
        "-march=x86-64-v3",
        "-mtls-dialect=gnu2",
    ],
    "//conditions:default": [],
})
