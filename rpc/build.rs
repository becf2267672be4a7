//! Compiles the protos with protox, so that no machine needs `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(["proto/engine.proto"], ["proto"])?;
    tonic_prost_build::configure().codec_path("crate::codec::MessageCodec").compile_fds(descriptors)?;
    Ok(())
}
