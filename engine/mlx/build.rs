//! Lets this crate's tests find `libmlx.so` on Linux. It builds nothing: `cargo xtask setup` does.

fn main() {
    println!("cargo:rerun-if-env-changed=RUSSET_MLX_LIB");
    if let Ok(dir) = std::env::var("RUSSET_MLX_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{dir}");
    }
}
