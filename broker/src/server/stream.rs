//! The byte stream of a connection: plain TCP, where segment files go out by `sendfile`, or TLS.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use crate::partition::Slice;

pub enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Most bytes that one `sendfile` or file read moves before others get their turn.
const FILE_STEP: usize = 1 << 20;

/// Piece of a read that brings a cold range into the page cache.
const WARM_STEP: usize = 256 << 10;

impl Stream {
    /// Reads what is there; 0 at the end. Cancelling loses nothing.
    pub async fn read_buf(&mut self, buf: &mut BytesMut) -> io::Result<usize> {
        match self {
            Stream::Plain(stream) => stream.read_buf(buf).await,
            Stream::Tls(stream) => stream.read_buf(buf).await,
        }
    }

    /// Writes all bytes; with `more`, the kernel may wait for what follows before it sends a packet.
    pub async fn write_all(&mut self, bytes: &[u8], more: bool) -> io::Result<()> {
        match self {
            Stream::Plain(stream) if more => send_more(stream, bytes).await,
            Stream::Plain(stream) => stream.write_all(bytes).await,
            Stream::Tls(stream) => stream.write_all(bytes).await,
        }
    }

    pub async fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(_) => Ok(()),
            Stream::Tls(stream) => stream.flush().await,
        }
    }

    /// Sends a range of a segment file.
    pub async fn write_slice(&mut self, slice: &Slice) -> io::Result<()> {
        if let (Stream::Plain(stream), Some(file)) = (&*self, slice.reader.file()) {
            return send_file(stream, &file, slice).await;
        }
        let (mut position, end) = (slice.position, slice.position + slice.len as u64);
        while position < end {
            let len = FILE_STEP.min((end - position) as usize);
            let bytes: Bytes = slice.reader.read_at(position, len).map_err(io::Error::other)?;
            if bytes.is_empty() {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "a segment is shorter than its index says",
                ));
            }
            self.write_all(&bytes, false).await?;
            position += bytes.len() as u64;
        }
        Ok(())
    }

    /// Ends the stream politely.
    pub async fn shutdown(&mut self) {
        let _ = match self {
            Stream::Plain(stream) => stream.shutdown().await,
            Stream::Tls(stream) => stream.shutdown().await,
        };
    }
}

/// Reads a range that is not in the page cache on a blocking thread first: `sendfile` would stop this
/// one, and every connection on it, for the disk.
async fn warm_up(file: &Arc<File>, from: u64, to: u64) -> io::Result<()> {
    if is_cached(file, from) && is_cached(file, to - 1) {
        return Ok(());
    }
    let file = file.clone();
    let read = tokio::task::spawn_blocking(move || {
        let mut piece = vec![0; WARM_STEP.min((to - from) as usize)];
        let mut at = from;
        while at < to {
            let want = piece.len().min((to - at) as usize);
            match file.read_at(&mut piece[..want], at)? {
                0 => break,
                read => at += read as u64,
            }
        }
        Ok(())
    });
    read.await.map_err(io::Error::other)?
}

/// Whether the byte at `at` can be read without waiting. Where the file system cannot say, it is
/// assumed that it can.
fn is_cached(file: &File, at: u64) -> bool {
    let mut byte = [0];
    let mut bufs = [io::IoSliceMut::new(&mut byte)];
    let read = rustix::io::preadv2(file, &mut bufs, at, rustix::io::ReadWriteFlags::NOWAIT);
    !matches!(read, Err(rustix::io::Errno::AGAIN))
}

async fn send_more(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    use rustix::net::{SendFlags, send};
    while !bytes.is_empty() {
        stream.writable().await?;
        let flags = SendFlags::MORE | SendFlags::NOSIGNAL;
        let sent = stream.try_io(Interest::WRITABLE, || Ok(send(stream.as_fd(), bytes, flags)?));
        match sent {
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

async fn send_file(stream: &TcpStream, file: &Arc<File>, slice: &Slice) -> io::Result<()> {
    let mut offset = slice.position;
    let end = slice.position + slice.len as u64;
    let mut warm_to = offset;
    while offset < end {
        if offset >= warm_to {
            warm_to = end.min(offset + FILE_STEP as u64);
            warm_up(file, offset, warm_to).await?;
        }
        stream.writable().await?;
        let len = (warm_to - offset) as usize;
        let sent = stream.try_io(Interest::WRITABLE, || {
            Ok(rustix::fs::sendfile(stream.as_fd(), file.as_fd(), Some(&mut offset), len)?)
        });
        match sent {
            Ok(0) => {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "a segment is shorter than its index says",
                ));
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
