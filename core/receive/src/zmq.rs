//! The few functions of libzmq that reading takes, found in the library that is loaded already.
//!
//! All `unsafe` that has to do with ZeroMQ is here. What must always hold: a [`Socket`] is used by one thread at a time,
//! and no longer once its owner closes it (whoever makes one promises that), and a [`Message`] stays where it is.

use std::ffi::{CStr, CString, c_int, c_void};
use std::fmt;
use std::ptr::NonNull;

const ZMQ_FD: c_int = 14;
const ZMQ_EVENTS: c_int = 15;
const ZMQ_POLLIN: c_int = 1;
const ZMQ_DONTWAIT: c_int = 1;

/// Room for a `zmq_msg_t`, which has had this size and alignment in every libzmq from 4.1 on.
#[repr(C, align(8))]
struct RawMessage([u8; 64]);

/// Why there is no library to read with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unusable(String);

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The functions of a libzmq that this process has loaded.
#[derive(Clone, Copy)]
pub struct Library {
    errno: unsafe extern "C" fn() -> c_int,
    getsockopt: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut usize) -> c_int,
    init: unsafe extern "C" fn(*mut RawMessage) -> c_int,
    close: unsafe extern "C" fn(*mut RawMessage) -> c_int,
    receive: unsafe extern "C" fn(*mut RawMessage, *mut c_void, c_int) -> c_int,
    data: unsafe extern "C" fn(*mut RawMessage) -> *mut c_void,
    size: unsafe extern "C" fn(*const RawMessage) -> usize,
    more: unsafe extern "C" fn(*const RawMessage) -> c_int,
}

impl Library {
    /// The libzmq that belongs to a shared object of this process: that itself, or one that it was linked to.
    ///
    /// # Errors
    /// It is not loaded, has no libzmq that shows its functions, or one of another major version than 4.
    #[expect(clippy::missing_transmute_annotations, reason = "the fields say the types")]
    pub fn loaded_with(object: &str) -> Result<Self, Unusable> {
        let path = CString::new(object).map_err(|_| Unusable(format!("{object:?} is no path")))?;
        // SAFETY: the path is a C string; with RTLD_NOLOAD nothing is loaded, so no code runs. The handle is kept for
        // good, so the library stays.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        let handle = NonNull::new(handle).ok_or_else(|| Unusable(format!("{object} is not loaded")))?;
        let find = |name: &CStr| {
            // SAFETY: the handle is one of dlopen, the name a C string.
            NonNull::new(unsafe { libc::dlsym(handle.as_ptr(), name.as_ptr()) })
                .ok_or_else(|| Unusable(format!("{object} shows no {}", name.to_string_lossy())))
        };
        // SAFETY: libzmq's header declares a function of this name so.
        let version: unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int) =
            unsafe { std::mem::transmute(find(c"zmq_version")?) };
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: three places for ints, as declared.
        unsafe { version(&raw mut major, &raw mut minor, &raw mut patch) };
        if major != 4 || minor < 1 {
            return Err(Unusable(format!("{object} has libzmq {major}.{minor}.{patch}, not 4.1 or a later 4.x")));
        }
        // SAFETY: the header declares functions of these names as the fields have them.
        unsafe {
            Ok(Self {
                errno: std::mem::transmute(find(c"zmq_errno")?),
                getsockopt: std::mem::transmute(find(c"zmq_getsockopt")?),
                init: std::mem::transmute(find(c"zmq_msg_init")?),
                close: std::mem::transmute(find(c"zmq_msg_close")?),
                receive: std::mem::transmute(find(c"zmq_msg_recv")?),
                data: std::mem::transmute(find(c"zmq_msg_data")?),
                size: std::mem::transmute(find(c"zmq_msg_size")?),
                more: std::mem::transmute(find(c"zmq_msg_more")?),
            })
        }
    }

    /// A message without content.
    pub(crate) fn message(&self) -> Box<Message> {
        let mut message = Box::new(Message { library: *self, raw: RawMessage([0; 64]) });
        // SAFETY: room for a message, which `Drop` closes; it is in a box, so it does not move.
        unsafe { (self.init)(&raw mut message.raw) };
        message
    }
}

/// What one call of [`Socket::receive`] brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Received {
    /// A frame, and whether more frames of its message follow.
    Frame { more: bool },
    /// Nothing is there.
    Nothing,
    /// The socket can't be read; its owner will meet the error too.
    Broken,
}

/// One frame.
pub(crate) struct Message {
    library: Library,
    raw: RawMessage,
}

impl Message {
    pub(crate) fn bytes(&mut self) -> &[u8] {
        // SAFETY: the message was initialised; it owns so many bytes at this address until it is received into or closed,
        // for which it would have to be borrowed mutably.
        unsafe {
            match (self.library.size)(&raw const self.raw) {
                0 => &[],
                size => std::slice::from_raw_parts((self.library.data)(&raw mut self.raw).cast::<u8>(), size),
            }
        }
    }

    /// Let go of the content.
    pub(crate) fn clear(&mut self) {
        // SAFETY: initialised; initialised anew at once, so that it always is.
        unsafe {
            (self.library.close)(&raw mut self.raw);
            (self.library.init)(&raw mut self.raw);
        }
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        // SAFETY: initialised, and never used again.
        unsafe { (self.library.close)(&raw mut self.raw) };
    }
}

// SAFETY: a message's content belongs to nobody else, or is counted atomically by libzmq.
unsafe impl Send for Message {}

/// A socket that somebody else owns.
pub(crate) struct Socket {
    library: Library,
    address: NonNull<c_void>,
}

impl Socket {
    /// # Safety
    /// `address` is that of an open socket of this library; it stays open, and no other thread uses it, while this lives.
    pub(crate) unsafe fn at(library: Library, address: NonNull<c_void>) -> Self {
        Self { library, address }
    }

    /// Receive a frame, if one is there.
    pub(crate) fn receive(&self, frame: &mut Message) -> Received {
        // SAFETY: `at` promises the socket; the message was initialised.
        let size = unsafe { (self.library.receive)(&raw mut frame.raw, self.address.as_ptr(), ZMQ_DONTWAIT) };
        if size >= 0 {
            // SAFETY: the message was initialised.
            let more = unsafe { (self.library.more)(&raw const frame.raw) } != 0;
            return Received::Frame { more };
        }
        // SAFETY: takes nothing.
        match unsafe { (self.library.errno)() } {
            libc::EAGAIN => Received::Nothing,
            _ => Received::Broken,
        }
    }

    /// What to wait on: readable whenever the socket has to be looked at, until it was.
    pub(crate) fn descriptor(&self) -> Option<c_int> {
        self.option(ZMQ_FD)
    }

    /// There is something to receive (or the socket is broken, and its owner has to find out).
    pub(crate) fn is_readable(&self) -> bool {
        self.option(ZMQ_EVENTS).is_none_or(|events| events & ZMQ_POLLIN != 0)
    }

    fn option(&self, name: c_int) -> Option<c_int> {
        let mut value: c_int = 0;
        let mut size = size_of::<c_int>();
        // SAFETY: `at` promises the socket; both options are ints.
        let failed =
            unsafe { (self.library.getsockopt)(self.address.as_ptr(), name, (&raw mut value).cast(), &raw mut size) };
        (failed == 0).then_some(value)
    }
}

// SAFETY: libzmq's sockets may go from thread to thread as long as a full fence is between, which whatever hands this
// over has.
unsafe impl Send for Socket {}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(object: &str) -> String {
        Library::loaded_with(object).err().expect("must be refused").to_string()
    }

    #[test]
    fn what_is_not_loaded_or_has_no_libzmq_is_refused_by_name() {
        assert_eq!(refused("/nowhere/libzmq.so.5"), "/nowhere/libzmq.so.5 is not loaded");
        assert_eq!(refused("a\0b"), "\"a\\0b\" is no path");
        assert_eq!(refused("libc.so.6"), "libc.so.6 shows no zmq_version");
    }
}

/// A libzmq in which a test says what comes when.
#[cfg(test)]
pub(crate) mod fake {
    use super::*;
    use std::collections::VecDeque;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    /// A socket.
    pub(crate) struct Fake {
        /// Frames to come, and whether more of their message follow.
        pub(crate) frames: VecDeque<(Vec<u8>, bool)>,
        /// What gets news once the last one was read.
        pub(crate) then: Option<UnixStream>,
        near: UnixStream,
        /// Its other end: writing there is news.
        pub(crate) far: UnixStream,
    }

    impl Fake {
        pub(crate) fn new() -> Box<Self> {
            let (near, far) = UnixStream::pair().unwrap();
            Box::new(Self { frames: VecDeque::new(), then: None, near, far })
        }

        pub(crate) fn address(&mut self) -> NonNull<c_void> {
            NonNull::from(self).cast()
        }
    }

    /// The content of a message, and whether more follow; in a box whose address the message holds, or null.
    type Content = (Vec<u8>, bool);

    fn slot(message: *const RawMessage) -> *mut *mut Content {
        message.cast_mut().cast()
    }

    extern "C" fn init(message: *mut RawMessage) -> c_int {
        // SAFETY, here and below: the library gives messages and sockets that live, and were made here.
        unsafe { slot(message).write(std::ptr::null_mut()) };
        0
    }

    extern "C" fn close(message: *mut RawMessage) -> c_int {
        // SAFETY: as above.
        let content = unsafe { slot(message).replace(std::ptr::null_mut()) };
        if !content.is_null() {
            // SAFETY: as above; it is in no message any more.
            drop(unsafe { Box::from_raw(content) });
        }
        0
    }

    extern "C" fn receive(message: *mut RawMessage, socket: *mut c_void, _: c_int) -> c_int {
        // SAFETY: as above.
        let socket = unsafe { &mut *socket.cast::<Fake>() };
        let Some(frame) = socket.frames.pop_front() else {
            return -1;
        };
        if socket.frames.is_empty()
            && let Some(mut other) = socket.then.take()
        {
            other.write_all(b"x").unwrap();
        }
        close(message);
        let size = frame.0.len() as c_int;
        // SAFETY: as above.
        unsafe { slot(message).write(Box::into_raw(Box::new(frame))) };
        size
    }

    fn content<'a>(message: *const RawMessage) -> Option<&'a mut Content> {
        // SAFETY: as above.
        unsafe { (*slot(message)).as_mut() }
    }

    extern "C" fn data(message: *mut RawMessage) -> *mut c_void {
        content(message).map_or(std::ptr::null_mut(), |content| content.0.as_mut_ptr().cast())
    }

    extern "C" fn size(message: *const RawMessage) -> usize {
        content(message).map_or(0, |content| content.0.len())
    }

    extern "C" fn more(message: *const RawMessage) -> c_int {
        c_int::from(content(message).is_some_and(|content| content.1))
    }

    extern "C" fn errno() -> c_int {
        libc::EAGAIN
    }

    extern "C" fn getsockopt(socket: *mut c_void, name: c_int, value: *mut c_void, _: *mut usize) -> c_int {
        // SAFETY: as above; both options are ints.
        unsafe {
            let socket = &mut *socket.cast::<Fake>();
            let readable = !socket.frames.is_empty();
            let answer = if name == ZMQ_FD { socket.near.as_raw_fd() } else { c_int::from(readable) };
            value.cast::<c_int>().write(answer);
        }
        0
    }

    pub(crate) fn library() -> Library {
        Library { errno, getsockopt, init, close, receive, data, size, more }
    }
}
