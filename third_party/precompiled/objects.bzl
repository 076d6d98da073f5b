"""Objects of tests, compiled by clang with headers that were compiled beforehand."""

CLANG = "clang++-22"

# The flags of build:opt that change what a program does. Flags that make it fast, or that need an
# optimised build, are left out. GCC 12, which compiled Debian's libraries, writes the names of
# constrained templates as clang 17 did.
CLANG_FLAGS = [
    "-std=c++20",
    "-fPIC",
    "-O0",
    "-DNDEBUG",
    "-fclang-abi-compat=17",
    "-fno-omit-frame-pointer",
    "-fstack-protector-strong",
    "-ffunction-sections",
    "-fdata-sections",
]

WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unused-parameter",
]

def _test_objects_impl(ctx):
    context = cc_common.merge_cc_infos(
        cc_infos = [dep[CcInfo] for dep in ctx.attr.deps],
    ).compilation_context
    compiled = [file for file in ctx.files.precompiled if file.extension == "pch"][0]
    objects = []
    for source in ctx.files.srcs:
        stem = ctx.label.name + "/" + source.basename[:-len(".cc")]
        made = ctx.actions.declare_file(stem + ".pic.o")
        unused = ctx.actions.declare_file(stem + ".unused")

        # One a line, for the script, which says which of them the source does not read.
        declared = ctx.actions.args()
        declared.add_all([source] + ctx.files.headers)
        declared.add_all(context.headers)
        declared.use_param_file("%s", use_always = True)
        declared.set_param_file_format("multiline")
        flags = ctx.actions.args()
        flags.add(CLANG)
        flags.add_all(CLANG_FLAGS + WARNINGS)
        flags.add("-include-pch", compiled)
        flags.add_all(context.defines, before_each = "-D")
        flags.add_all(context.quote_includes, before_each = "-iquote")
        flags.add_all(context.includes, before_each = "-I")
        flags.add_all(context.system_includes, before_each = "-isystem")
        flags.add("-c", source)
        flags.add("-o", made)
        ctx.actions.run(
            mnemonic = "TestCompile",
            progress_message = "Compiling " + source.short_path,
            executable = ctx.executable._compile,
            arguments = [unused.path, declared, flags],
            inputs = depset(
                [source] + ctx.files.headers + ctx.files.precompiled,
                transitive = [context.headers],
            ),
            outputs = [made, unused],
            unused_inputs_list = unused,
            use_default_shell_env = True,
        )
        objects.append(made)
    return [DefaultInfo(files = depset(objects))]

test_objects = rule(
    doc = """Compiles each of srcs; a cc_test has the objects among its srcs.

    As for Bazel's own rules, a change of a header compiles only the sources again that read it.""",
    implementation = _test_objects_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cc"]),
        "headers": attr.label_list(allow_files = [".h"]),
        "deps": attr.label_list(providers = [CcInfo]),
        "precompiled": attr.label(mandatory = True),
        "_compile": attr.label(
            default = "//third_party/precompiled:compile.sh",
            allow_single_file = True,
            executable = True,
            cfg = "exec",
        ),
    },
)
