//! Waiting for many descriptors: a thin face of epoll.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Descriptors, each with a mark of the caller's. One stays ready for as long as there is something to read.
#[derive(Debug)]
pub(crate) struct Poll {
    epoll: OwnedFd,
    watched: usize,
    ready: Vec<libc::epoll_event>,
}

impl Poll {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: takes a flag only; what it returns is checked, and owned by nobody else.
        let epoll = unsafe {
            let fd = checked(libc::epoll_create1(libc::EPOLL_CLOEXEC))?;
            OwnedFd::from_raw_fd(fd)
        };
        Ok(Self { epoll, watched: 0, ready: Vec::new() })
    }

    pub(crate) fn add(&mut self, fd: RawFd, mark: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: mark };
        // SAFETY: epoll is open; the event is read during the call only.
        checked(unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) })?;
        self.watched += 1;
        Ok(())
    }

    pub(crate) fn remove(&mut self, fd: RawFd) {
        // SAFETY: epoll is open; a deletion reads no event.
        let removed = unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
        debug_assert_eq!(removed, 0);
        self.watched -= 1;
    }

    /// The marks of all that is ready now, or becomes so within this time, rounded up to milliseconds.
    pub(crate) fn wait(&mut self, patience: Duration) -> impl Iterator<Item = u64> {
        let room = self.watched.max(1); // for all, so that nothing ready is left out
        self.ready.resize(room, libc::epoll_event { events: 0, u64: 0 });
        let milliseconds = i32::try_from(patience.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX);
        let room = i32::try_from(room).unwrap_or(i32::MAX);
        // SAFETY: epoll is open; there is room for so many events.
        let ready = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), self.ready.as_mut_ptr(), room, milliseconds) };
        let ready = usize::try_from(ready).unwrap_or(0); // interrupted: nothing is ready yet
        self.ready[..ready].iter().map(|event| event.u64)
    }
}

fn checked(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn all_that_is_ready_is_told_until_it_is_read() {
        let mut poll = Poll::new().unwrap();
        let mut pairs: Vec<_> = (0..5).map(|_| UnixStream::pair().unwrap()).collect();
        for (mark, (_, read)) in pairs.iter().enumerate() {
            poll.add(read.as_raw_fd(), mark as u64).unwrap();
        }
        assert_eq!(poll.wait(Duration::ZERO).count(), 0);
        for (write, _) in &mut pairs {
            write.write_all(b"x").unwrap();
        }
        for _ in 0..2 {
            let mut ready: Vec<_> = poll.wait(Duration::from_secs(1)).collect();
            ready.sort_unstable();
            assert_eq!(ready, [0, 1, 2, 3, 4]);
        }
        pairs[3].1.read_exact(&mut [0]).unwrap();
        poll.remove(pairs[4].1.as_raw_fd());
        assert_eq!(poll.wait(Duration::ZERO).count(), 3);
    }

    #[test]
    fn a_descriptor_that_is_none_is_refused() {
        assert!(Poll::new().unwrap().add(-1, 0).is_err());
    }
}
