//! Compiles the part of etcd's `.proto` that is used, with protox, so that no system `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    #[cfg(feature = "cluster")]
    {
        let files = protox::compile(["proto/etcd.proto"], ["proto"])?;
        tonic_prost_build::configure().build_server(false).compile_fds(files)?;
    }
    Ok(())
}
