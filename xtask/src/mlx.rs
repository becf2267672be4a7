//! Prepares MLX for the engine on Linux, once per machine, in the user's cache folder.
//!
//! On macOS there is nothing to do: `mlx-sys` builds MLX itself, with Metal. On Linux the published
//! crate cannot build (it links Apple frameworks and has no half types on x86-64), so this file
//!
//! 1. downloads the official MLX wheels by hash (`libmlx.so` and its headers),
//! 2. builds the C interface, whose sources are inside the `mlx-sys` crate, against them,
//! 3. generates the Rust bindings with bindgen,
//! 4. writes a cargo configuration that replaces `mlx-sys`'s build script by these results.
//!
//! It does not build MLX, and nothing it creates is committed. A killed run leaves nothing partial:
//! everything is created in a temporary folder and published by one rename.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::step;

/// The MLX that `mlx-sys` pins; wheels and oracle use the same one, so kernels are identical.
pub const MLX_VERSION: &str = "0.32.2";
/// The crate whose C sources are built.
const MLX_SYS_VERSION: &str = "0.7.0";
/// The version `mlx-sys` itself builds with.
const BINDGEN_VERSION: &str = "0.72.1";
/// Increased whenever a step below changes its output.
const RECIPE: u32 = 1;

/// One platform with published wheels.
struct Platform {
    arch: &'static str,
    triple: &'static str,
    wheel_tag: &'static str,
    /// SHA-256 of the two wheels, so that only these bytes are ever linked.
    mlx: &'static str,
    mlx_cpu: &'static str,
}

const PLATFORMS: &[Platform] = &[
    Platform {
        arch: "x86_64",
        triple: "x86_64-unknown-linux-gnu",
        wheel_tag: "manylinux_2_35_x86_64",
        mlx: "4bc6709cd92a46de44caade61ec7831647005e66113243f681168f67001155d9",
        mlx_cpu: "fc5d31b90fc4f457b2f9614ed45651a567d22a6a11a03d114a90a4e10bdd8878",
    },
    Platform {
        arch: "aarch64",
        triple: "aarch64-unknown-linux-gnu",
        wheel_tag: "manylinux_2_35_aarch64",
        mlx: "765af966cb92abceb9d50b382908bea606d0796c04a9b4957f98ab630d030c36",
        mlx_cpu: "d0f94625588b51a878786dd51cec5617894ce586cf3c94645ce1b64e24c27c0b",
    },
];

/// `std::format` came with GCC 13; older compilers take the same function from fmt.
const FORMAT_SHIM: &str = "\
#ifdef __cplusplus
#include <version>
#ifndef __cpp_lib_format
#define FMT_HEADER_ONLY
#include <fmt/format.h>
namespace std { using fmt::format; }
#endif
#endif
";

/// The C interface has half types on aarch64 only, yet mlx-rs names them everywhere.
const HALF_SHIM: &str = "
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default)]
pub struct float16_t(pub u16);
pub type bfloat16_t = u16;
pub unsafe fn mlx_array_data_float16(arr: mlx_array) -> *const float16_t {
    mlx_array_data_uint16(arr).cast()
}
pub unsafe fn mlx_array_data_bfloat16(arr: mlx_array) -> *const bfloat16_t {
    mlx_array_data_uint16(arr)
}
pub unsafe fn mlx_array_item_float16(res: *mut float16_t, arr: mlx_array) -> ::std::os::raw::c_int {
    mlx_array_item_bfloat16(res.cast(), arr)
}
pub unsafe fn mlx_array_item_bfloat16(res: *mut bfloat16_t, arr: mlx_array) -> ::std::os::raw::c_int {
    let status = mlx_array_eval(arr);
    if status == 0 {
        *res = *mlx_array_data_uint16(arr);
    }
    status
}
";

/// The output of `prepare`.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// `None` on macOS, where cargo alone is enough.
    linux: Option<Linux>,
}

#[derive(Clone, Debug)]
struct Linux {
    cargo_config: PathBuf,
    libmlx_dir: PathBuf,
}

impl Prepared {
    /// Arguments to put right after `cargo`, before the verb.
    pub fn cargo_args(&self) -> Vec<String> {
        self.linux
            .as_ref()
            .map(|linux| vec!["--config".to_owned(), linux.cargo_config.display().to_string()])
            .unwrap_or_default()
    }

    /// The folder of `libmlx.so`; `None` on macOS.
    pub fn libmlx_dir(&self) -> Option<&Path> {
        self.linux.as_ref().map(|linux| linux.libmlx_dir.as_path())
    }
}

/// The folder for everything that this workspace prepares outside `target`.
pub fn cache_dir() -> Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from(std::env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?)
            .join(".cache"),
    };
    Ok(base.join("russet"))
}

/// Prepares MLX; a second run finds it prepared and returns at once.
pub fn prepare() -> Result<Prepared> {
    if cfg!(target_os = "macos") {
        return Ok(Prepared { linux: None });
    }
    let arch = std::env::consts::ARCH;
    let platform = PLATFORMS
        .iter()
        .find(|platform| platform.arch == arch && cfg!(target_os = "linux"))
        .with_context(|| {
            format!(
                "no MLX wheels for {} on {arch}; Linux on x86_64 or aarch64, or macOS, is needed",
                std::env::consts::OS
            )
        })?;

    let cache = cache_dir()?;
    fs::create_dir_all(&cache).with_context(|| format!("create {}", cache.display()))?;
    let name = format!("mlx-{MLX_VERSION}-sys-{MLX_SYS_VERSION}-{arch}-{RECIPE}");
    let home = cache.join(&name);
    let prepared = || Prepared {
        linux: Some(Linux { cargo_config: home.join("cargo.toml"), libmlx_dir: home.join("wheel/mlx/lib") }),
    };
    if home.join("cargo.toml").exists() {
        return Ok(prepared());
    }

    // Two runs at once would do the work twice; the second waits here and then finds it done.
    let lock = fs::File::create(cache.join(format!("{name}.lock")))?;
    lock.lock().with_context(|| format!("lock {}", cache.display()))?;
    if !home.join("cargo.toml").exists() {
        let aside = cache.join(format!("{name}.partial"));
        let _ = fs::remove_dir_all(&aside);
        fs::create_dir_all(&aside)?;
        build(platform, &aside, &home)?;
        let _ = fs::remove_dir_all(&home);
        fs::rename(&aside, &home).with_context(|| format!("publish {}", home.display()))?;
    }
    Ok(prepared())
}

/// Builds everything in `aside`; `home` is its path once published.
fn build(platform: &Platform, aside: &Path, home: &Path) -> Result<()> {
    println!("mlx: preparing MLX {MLX_VERSION} for {} (once, about two minutes)", platform.triple);
    let source = mlx_c_source()?;
    fetch_wheels(platform, aside)?;
    build_mlx_c(&source, aside)?;
    generate_bindings(&source, aside)?;
    fs::write(aside.join("cargo.toml"), cargo_config(platform.triple, home))?;
    Ok(())
}

/// The C interface's sources inside the `mlx-sys` crate, which cargo downloads like any other.
fn mlx_c_source() -> Result<PathBuf> {
    let output = Command::new(cargo())
        .args(["metadata", "--format-version", "1"])
        .output()
        .context("run cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("read cargo metadata")?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let package = packages
        .iter()
        .find(|package| package["name"] == "mlx-sys")
        .context("the workspace does not depend on mlx-sys; the engine should, through mlx-rs")?;
    ensure!(
        package["version"] == MLX_SYS_VERSION,
        "Cargo.lock has mlx-sys {}, but this recipe is for {MLX_SYS_VERSION}; update the versions in xtask/src/mlx.rs together",
        package["version"]
    );
    let manifest = package["manifest_path"].as_str().context("mlx-sys has no manifest path")?;
    let source = Path::new(manifest).with_file_name("src").join("mlx-c");
    ensure!(source.join("CMakeLists.txt").exists(), "{} holds no mlx-c sources", source.display());
    Ok(source)
}

fn fetch_wheels(platform: &Platform, aside: &Path) -> Result<()> {
    let requirements = aside.join("requirements.txt");
    fs::write(
        &requirements,
        format!(
            "mlx=={MLX_VERSION} --hash=sha256:{}\nmlx-cpu=={MLX_VERSION} --hash=sha256:{}\n",
            platform.mlx, platform.mlx_cpu
        ),
    )?;
    // Debian's python3 comes without pip, but can make an environment that has it.
    let tools = aside.join("python");
    run(
        Command::new("python3").args(["-m", "venv"]).arg(&tools),
        "make a virtual environment (needs: apt-get install python3-venv)",
    )?;
    let python = tools.join("bin/python3");
    let wheels = aside.join("wheels");
    // Explicit tags, so that the machine's own Python may be any version: only the library and the headers
    // are used.
    run(
        Command::new(&python)
            .args([
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--require-hashes",
            ])
            .args(["--only-binary=:all:", "--implementation", "cp", "--python-version", "3.11"])
            .args(["--abi", "cp311", "--abi", "none", "--platform", platform.wheel_tag])
            .arg("--dest")
            .arg(&wheels)
            .arg("--requirement")
            .arg(&requirements),
        "download the MLX wheels (needs PyPI or a mirror of it)",
    )?;
    for wheel in fs::read_dir(&wheels)? {
        run(
            Command::new(&python).args(["-m", "zipfile", "-e"]).arg(wheel?.path()).arg(aside.join("wheel")),
            "unpack an MLX wheel",
        )?;
    }
    fs::remove_dir_all(&tools)?;
    fs::remove_dir_all(&wheels)?;
    Ok(())
}

fn build_mlx_c(source: &Path, aside: &Path) -> Result<()> {
    let shim = aside.join("format-shim.h");
    fs::write(&shim, FORMAT_SHIM)?;
    let work = aside.join("build");
    run(
        Command::new("cmake")
            .args([
                "-G",
                "Ninja",
                "-DCMAKE_BUILD_TYPE=Release",
                "-DMLX_C_USE_SYSTEM_MLX=ON",
                "-DMLX_C_BUILD_EXAMPLES=OFF",
            ])
            .arg(format!("-DMLX_DIR={}", aside.join("wheel/mlx/share/cmake/MLX").display()))
            .arg(format!("-DCMAKE_CXX_FLAGS=-include {}", shim.display()))
            .arg("-S")
            .arg(source)
            .arg("-B")
            .arg(&work),
        "configure mlx-c (needs: apt-get install cmake ninja-build g++ libfmt-dev)",
    )?;
    run(
        Command::new("cmake").arg("--build").arg(&work),
        "build mlx-c (needs: apt-get install g++ libfmt-dev)",
    )?;
    fs::create_dir_all(aside.join("lib"))?;
    fs::rename(work.join("libmlxc.a"), aside.join("lib/libmlxc.a")).context("mlx-c built no libmlxc.a")?;
    fs::remove_dir_all(&work)?;
    Ok(())
}

fn generate_bindings(source: &Path, aside: &Path) -> Result<()> {
    // bindgen is a build tool of this one step: installing it here keeps xtask itself light.
    let tool = aside.join("bindgen");
    run(
        Command::new(cargo())
            .args([
                "install",
                "--quiet",
                "--debug",
                "--locked",
                "--no-track",
                "bindgen-cli",
                "--version",
                BINDGEN_VERSION,
            ])
            .arg("--root")
            .arg(&tool)
            .arg("--target-dir")
            .arg(tool.join("target")),
        "install bindgen-cli",
    )?;
    let out = aside.join("out");
    fs::create_dir_all(&out)?;
    let bindings = out.join("bindings.rs");
    run(
        Command::new(tool.join("bin/bindgen"))
            .args(["--rust-target", "1.73", "--no-layout-tests"])
            .args(["--allowlist-item", "_?mlx_.*", "--allowlist-item", "MLX_.*"])
            .arg(source.join("mlx/c/mlx.h"))
            .arg("--output")
            .arg(&bindings)
            .arg("--")
            .arg(format!("-I{}", source.display())),
        "generate the bindings (needs: apt-get install libclang-dev)",
    )?;
    let mut text = fs::read_to_string(&bindings)?;
    if !text.contains("fn mlx_array_item_float16") {
        text.push_str(HALF_SHIM);
        fs::write(&bindings, text)?;
    }
    fs::remove_dir_all(&tool)?;
    Ok(())
}

/// The override replaces `mlx-sys`'s build script: `OUT_DIR` is where the crate looks for its bindings.
/// OpenBLAS comes before MLX so that its symbols have precedence over the wheel's own BLAS, which is 25 times
/// slower; the engine calls into it, else the linker would drop it.
fn cargo_config(triple: &str, home: &Path) -> String {
    let path = |tail: &str| toml_string(&home.join(tail));
    format!(
        "# Written by `cargo xtask setup`. Use: cargo --config {config} build --package russet-engine\n\
         [target.{triple}.mlx]\n\
         rustc-link-search = [{native}, {mlx}]\n\
         rustc-link-lib = [\"static=mlxc\", \"dylib=openblas\", \"dylib=mlx\", \"dylib=stdc++\"]\n\
         rustc-env = {{ OUT_DIR = {out} }}\n\
         \n\
         [env]\n\
         # Read by the build scripts of engine and engine/mlx, for the run path.\n\
         RUSSET_MLX_LIB = {mlx}\n",
        config = home.join("cargo.toml").display(),
        native = path("lib"),
        mlx = path("wheel/mlx/lib"),
        out = path("out"),
    )
}

fn toml_string(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}

fn cargo() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Runs a step; an error names it.
fn run(command: &mut Command, step: &str) -> Result<()> {
    println!("mlx: {}", step.split(" (").next().unwrap_or(step));
    step::run(command, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cargo_config_quotes_paths_and_names_one_target() {
        let text = cargo_config("x86_64-unknown-linux-gnu", Path::new("/home/a \"b\"/c"));
        assert!(text.contains("[target.x86_64-unknown-linux-gnu.mlx]"));
        assert!(text.contains(r#"rustc-env = { OUT_DIR = "/home/a \"b\"/c/out" }"#), "{text}");
        assert!(text.contains("RUSSET_MLX_LIB"));
    }

    #[test]
    fn macos_needs_no_cargo_arguments() {
        assert!(Prepared { linux: None }.cargo_args().is_empty());
    }
}
