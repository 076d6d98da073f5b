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

# A compiled header holds the templates that its own code needs, and no times of files.
PCH_FLAGS = [
    "-fpch-instantiate-templates",
    "-Xclang",
    "-fno-pch-timestamp",
]

WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unused-parameter",
]

def _compile(ctx, source, made, flags, headers = []):
    """Runs clang.

    A script says which headers the source does not read. Names in an object are relative to the
    root. A compiled header holds the paths of the headers that it read, and clang makes them
    absolute: paths of /proc/self/cwd are so already, and the same in all clones.
    """
    compiled = ctx.files.precompiled
    name = ctx.attr.precompiled.label.name + ".pch"
    context = cc_common.merge_cc_infos(
        cc_infos = [dep[CcInfo] for dep in ctx.attr.deps],
    ).compilation_context
    root = "/proc/self/cwd/" if made.extension == "pch" else ""
    unused = ctx.actions.declare_file(made.basename + ".unused", sibling = made)

    # One a line, for the script.
    declared = ctx.actions.args()
    declared.add_all([source] + headers)
    declared.add_all(context.headers)
    declared.use_param_file("%s", use_always = True)
    declared.set_param_file_format("multiline")
    arguments = ctx.actions.args()
    arguments.add(CLANG)
    arguments.add_all(CLANG_FLAGS + WARNINGS)
    compiled_header = [file for file in compiled if file.basename == name][0]
    arguments.add("-include-pch")
    arguments.add(compiled_header, format = root + "%s")
    arguments.add_all(context.defines, before_each = "-D")
    arguments.add_all(context.quote_includes, before_each = "-iquote", format_each = root + "%s")
    arguments.add_all(context.includes, before_each = "-I", format_each = root + "%s")
    arguments.add_all(context.system_includes, before_each = "-isystem", format_each = root + "%s")
    arguments.add_all(flags)
    arguments.add(source, format = root + "%s")
    arguments.add("-o", made)
    ctx.actions.run(
        mnemonic = "TestCompile",
        progress_message = "Compiling " + source.short_path,
        executable = ctx.executable._compile,
        arguments = [unused.path, declared, arguments],
        inputs = depset([source] + headers + compiled, transitive = [context.headers]),
        outputs = [made, unused],
        unused_inputs_list = unused,
        use_default_shell_env = True,
    )

def _test_objects_impl(ctx):
    objects = []
    for source in ctx.files.srcs:
        stem = ctx.label.name + "/" + source.basename[:-len(".cc")]
        made = ctx.actions.declare_file(stem + ".pic.o")
        _compile(ctx, source, made, ["-c"], ctx.files.headers)
        objects.append(made)
    return [DefaultInfo(files = depset(objects))]

_COMPILE = attr.label(
    default = "//third_party/precompiled:compile.sh",
    allow_single_file = True,
    executable = True,
    cfg = "exec",
)

test_objects = rule(
    doc = """Compiles each of srcs; a cc_test has the objects among its srcs.

    As for Bazel's own rules, a change of a header compiles only the sources again that read it.""",
    implementation = _test_objects_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cc"]),
        "headers": attr.label_list(allow_files = [".h"]),
        "deps": attr.label_list(providers = [CcInfo]),
        "precompiled": attr.label(mandatory = True),
        "_compile": _COMPILE,
    },
)

def _own_test_headers_impl(ctx):
    header = ctx.actions.declare_file("compiled/" + ctx.label.name + ".h")
    ctx.actions.write(header, "".join(['#include "%s"\n' % name for name in ctx.attr.includes]))
    made = ctx.actions.declare_file("compiled/" + ctx.label.name + ".pch")
    _compile(ctx, header, made, PCH_FLAGS + ["-x", "c++-header"])
    return [DefaultInfo(files = depset([made, header] + ctx.files.precompiled))]

own_test_headers = rule(
    doc = """Compiles headers of this tree that most sources of a folder's tests include.

    They are compiled on top of the headers of libraries. After a change of one of them all sources
    that are compiled with it are compiled again; a test runs again only if its objects changed.""",
    implementation = _own_test_headers_impl,
    attrs = {
        "includes": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "precompiled": attr.label(mandatory = True),
        "_compile": _COMPILE,
    },
)
