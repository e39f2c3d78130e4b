//! Waits for all sockets of the streams, takes what lanes accept, and says who has to be asked about the rest.
//!
//! What must always hold:
//!
//! * A message is taken only if no sign stands against it that was there when it had been read: another socket of the
//!   same stream that wants to be looked at (a monitor may tell that the connection is over), or a call of the owner
//!   (who may be about to change anything). Else it is handed up with all that was read of its stream, in order.
//! * A message that its lane does not accept is handed up, and none behind it is read.
//! * A stream that is asked about has no lane any more: whoever owns the stream decides first, and gives it one anew.
//! * One round takes a bounded number of messages and bytes, shared fairly among the lanes that have any.
//! * No readiness is lost. A descriptor tells of news only, so a socket stays `ready` until it was found empty, and all
//!   sockets of a stream are `ready` again when somebody else may have touched them.
//!
//! Cost: one `epoll_wait` to wait, another to look for signs, whatever the number of sockets; libzmq looks three times at
//! the descriptor of a socket that has news. Between two rounds there is a pause, so that a round finds many messages:
//! that spares wake-ups on both sides, and adds no more than the pause to the age of what is read.

use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use std::collections::{HashMap, HashSet};

use kvsync_index::Index;

use crate::lane::{Head, Lane, Progress, Tally};
use crate::poll::Poll;
use crate::zmq::{Library, Message, Received, Socket};

/// Between two rounds, while all that came was read.
const PAUSE: Duration = Duration::from_millis(1);

/// The mark of the descriptor by which the owner calls.
const CALL: u64 = u64::MAX;

/// How far to go without asking.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// See [`Lane::new`].
    pub pause: f64,
    /// A stream of which more messages were taken since its queue was last found empty has to be asked about.
    pub messages: u64,
    /// The same for bytes.
    pub bytes: u64,
}

/// The frames of a message.
pub type Frames = Vec<Vec<u8>>;

/// What became of one stream.
#[derive(Debug, Default)]
pub struct Report {
    /// As given with its sockets.
    pub stream: u64,
    /// What was taken.
    pub tally: Option<Tally>,
    /// Seconds of the longest round in which something was taken, that of other streams included.
    pub seconds: f64,
    /// Messages that were taken since its queue was last found empty.
    pub messages: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Its queue was found empty.
    pub emptied: bool,
    /// Messages that were read and not taken.
    pub handed: Vec<Frames>,
    /// Its sockets have to be looked at.
    pub asks: bool,
}

/// Messages taken since a queue was last found empty.
#[derive(Default)]
struct Backlog {
    messages: u64,
    bytes: u64,
    emptied: bool,
}

struct Watched {
    socket: Socket,
    descriptor: RawFd,
    stream: u64,
    /// There may be something to receive.
    ready: bool,
    lane: Option<Lane>,
    backlog: Backlog,
    seconds: f64,
}

/// Room for one message, and what its lane found in it.
struct Read {
    /// Topic, sequence, payload.
    frames: [Box<Message>; 3],
    head: Option<Head>,
}

/// What one look for a message brought.
enum Looked {
    /// One of three frames.
    Regular,
    /// One of any other number.
    Odd(Frames),
    Nothing,
    /// The socket can't be read; its owner will find out how.
    Broken,
}

impl Read {
    fn new(library: &Library) -> Self {
        Self { frames: std::array::from_fn(|_| library.message()), head: None }
    }

    fn receive(&mut self, socket: &Socket) -> Looked {
        let mut odd = Frames::new();
        for number in 0.. {
            let frame = &mut self.frames[number.min(2)];
            let more = match socket.receive(frame) {
                Received::Frame { more } => more,
                Received::Nothing if number == 0 => return Looked::Nothing,
                Received::Nothing | Received::Broken => return Looked::Broken, // messages come whole
            };
            match (number, more) {
                (0 | 1, true) => {}
                (2, false) => return Looked::Regular,
                (0..=2, _) => odd = self.copied(number + 1),
                _ => odd.push(self.frames[2].bytes().to_vec()),
            }
            if !more {
                break;
            }
        }
        Looked::Odd(odd)
    }

    fn copied(&mut self, frames: usize) -> Frames {
        self.frames[..frames].iter_mut().map(|frame| frame.bytes().to_vec()).collect()
    }

    fn size(&mut self) -> usize {
        self.frames.iter_mut().map(|frame| frame.bytes().len()).sum()
    }

    fn clear(&mut self) {
        self.frames.iter_mut().for_each(|frame| frame.clear());
    }
}

/// What one round read of one lane.
struct Share {
    slot: usize,
    /// Its messages among all that were read.
    messages: std::ops::Range<usize>,
    bytes: u64,
    emptied: bool,
    /// The one behind them, which the lane does not accept.
    odd: Option<Frames>,
    broken: bool,
}

/// See the module.
pub struct Receiver {
    library: Library,
    index: Arc<Index>,
    poll: Poll,
    limits: Limits,
    watched: Vec<Option<Watched>>,
    by_address: HashMap<usize, usize>,
    by_stream: HashMap<u64, Vec<usize>>,
    /// Those of `watched` that are `ready`.
    ready: Vec<usize>,
    /// Room for what a round reads.
    read: Vec<Read>,
}

impl Receiver {
    /// `call`: a descriptor that is readable while the owner calls.
    ///
    /// # Errors
    /// The system has no descriptors left, or `call` is none.
    pub fn new(library: Library, index: Arc<Index>, call: RawFd, limits: Limits) -> io::Result<Self> {
        let mut poll = Poll::new()?;
        poll.add(call, CALL)?;
        Ok(Self {
            library,
            index,
            poll,
            limits,
            watched: Vec::new(),
            by_address: HashMap::new(),
            by_stream: HashMap::new(),
            ready: Vec::new(),
            read: Vec::new(),
        })
    }

    /// Wait for one more socket, which belongs to a stream.
    ///
    /// # Errors
    /// It has no descriptor, or the system refuses to wait for one more. `InvalidInput`: it is waited for already.
    ///
    /// # Safety
    /// `address` is that of an open socket of the library. Until [`remove`](Self::remove) it stays open, and no other
    /// thread uses it while this is used.
    pub unsafe fn add(&mut self, stream: u64, address: NonNull<std::ffi::c_void>) -> io::Result<()> {
        let key = address.as_ptr().addr();
        if self.by_address.contains_key(&key) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: promised by the caller.
        let socket = unsafe { Socket::at(self.library, address) };
        let descriptor = socket.descriptor().ok_or(io::ErrorKind::NotConnected)?;
        let free = self.watched.iter().position(Option::is_none);
        let slot = free.unwrap_or_else(|| {
            self.watched.push(None);
            self.watched.len() - 1
        });
        self.poll.add(descriptor, slot as u64)?;
        self.watched[slot] = Some(Watched {
            socket,
            descriptor,
            stream,
            ready: false,
            lane: None,
            backlog: Backlog::default(),
            seconds: 0.0,
        });
        self.by_address.insert(key, slot);
        self.by_stream.entry(stream).or_default().push(slot);
        self.set_ready(slot); // whatever came before shows no more
        Ok(())
    }

    /// Wait for a socket no longer. One that is not waited for is ignored.
    pub fn remove(&mut self, address: usize) {
        let Some(slot) = self.by_address.remove(&address) else {
            return;
        };
        let Some(watched) = self.watched[slot].take() else {
            return;
        };
        self.poll.remove(watched.descriptor);
        self.ready.retain(|ready| *ready != slot);
        if let Some(slots) = self.by_stream.get_mut(&watched.stream) {
            slots.retain(|other| *other != slot);
            if slots.is_empty() {
                self.by_stream.remove(&watched.stream);
            }
        }
    }

    /// Take from a socket what continues its stream: from number `next` on, `at` being the time of the batch before it.
    ///
    /// `None`: the socket is not waited for, or the index does not know the worker; then nothing is taken.
    pub fn follow(&mut self, address: usize, worker: &str, next: u64, at: f64) -> Option<Progress> {
        let lane = Lane::new(self.index.worker(worker)?, next, at, self.limits.pause);
        let progress = lane.progress();
        self.find(address)?.lane = Some(lane);
        Some(progress)
    }

    /// Take nothing more from a socket.
    pub fn leave(&mut self, address: usize) {
        if let Some(watched) = self.find(address) {
            watched.lane = None;
        }
    }

    fn find(&mut self, address: usize) -> Option<&mut Watched> {
        let slot = *self.by_address.get(&address)?;
        self.watched[slot].as_mut()
    }

    /// Wait, and take what lanes accept, until something has to be asked, the owner calls, or the time is over. What was
    /// taken is reported at the end. One round takes about `messages` and `bytes` at most.
    pub fn wait(&mut self, patience: Duration, messages: usize, bytes: usize) -> Vec<Report> {
        let began = Instant::now();
        let mut taken: HashSet<usize> = HashSet::new();
        let mut asking: HashMap<u64, Vec<Frames>> = HashMap::new();
        loop {
            let left = patience.saturating_sub(began.elapsed());
            let mut called = self.look(if self.ready.is_empty() { left } else { Duration::ZERO });
            self.find_asking(&mut asking);
            if !called {
                let shares = self.read_lanes(&asking, messages, bytes);
                called = self.look(Duration::ZERO);
                self.find_asking(&mut asking);
                let started = Instant::now();
                for share in &shares {
                    let stream = self.at(share.slot).stream;
                    if called || asking.contains_key(&stream) {
                        let read = self.read[share.messages.clone()].iter_mut().map(|read| read.copied(3));
                        asking.entry(stream).or_default().extend(read);
                    } else {
                        if self.take(share) {
                            asking.entry(stream).or_default();
                        }
                        taken.insert(share.slot);
                    }
                }
                let seconds = started.elapsed().as_secs_f64();
                for share in shares {
                    let watched = self.at(share.slot);
                    watched.seconds = watched.seconds.max(seconds);
                    let stream = watched.stream;
                    if share.odd.is_some() || share.broken {
                        asking.entry(stream).or_default().extend(share.odd);
                    }
                    self.read[share.messages].iter_mut().for_each(Read::clear);
                }
            }
            let left = patience.saturating_sub(began.elapsed());
            if called || !asking.is_empty() || left.is_zero() {
                return self.report(&taken, asking);
            }
            if self.ready.is_empty() {
                std::thread::sleep(PAUSE.min(left));
            }
        }
    }

    /// See what has news. True: the owner calls.
    fn look(&mut self, patience: Duration) -> bool {
        let mut called = false;
        for mark in self.poll.wait(patience) {
            let slot = match usize::try_from(mark) {
                Ok(slot) if mark != CALL => slot,
                _ => {
                    called = true;
                    continue;
                }
            };
            if let Some(watched) = self.watched[slot].as_mut().filter(|watched| !watched.ready) {
                watched.ready = true;
                self.ready.push(slot);
            }
        }
        called
    }

    fn set_ready(&mut self, slot: usize) {
        let watched = self.at(slot);
        if !watched.ready {
            watched.ready = true;
            self.ready.push(slot);
        }
    }

    /// Those in `ready` and by stream are there.
    fn at(&mut self, slot: usize) -> &mut Watched {
        self.watched[slot].as_mut().expect("only sockets that are waited for are noted")
    }

    /// Add the streams of which a socket without a lane has something, with nothing read of them yet.
    fn find_asking(&mut self, asking: &mut HashMap<u64, Vec<Frames>>) {
        let watched = &mut self.watched;
        self.ready.retain(|slot| {
            let Some(watched) = watched[*slot].as_mut() else {
                return false;
            };
            if watched.lane.is_none() {
                watched.ready = watched.socket.is_readable();
                if watched.ready {
                    asking.entry(watched.stream).or_default();
                }
            }
            watched.ready
        });
    }

    /// Read what lanes accept of sockets that are ready, as far as nobody has to be asked.
    fn read_lanes(&mut self, asking: &HashMap<u64, Vec<Frames>>, messages: usize, bytes: usize) -> Vec<Share> {
        let ready = std::mem::take(&mut self.ready);
        let (lanes, mut left): (Vec<_>, Vec<_>) = ready.into_iter().partition(|slot| {
            let watched = self.watched[*slot].as_ref();
            watched.is_some_and(|watched| watched.lane.is_some() && !asking.contains_key(&watched.stream))
        });
        let messages = (messages / lanes.len().max(1)).max(1);
        let bytes = bytes / lanes.len().max(1);
        let mut shares = Vec::with_capacity(lanes.len());
        let mut first = 0;
        for slot in lanes {
            let share = self.read_lane(slot, first, messages, bytes);
            first = share.messages.end;
            let watched = self.at(slot);
            watched.ready = !share.emptied;
            if watched.ready {
                left.push(slot);
            }
            shares.push(share);
        }
        self.ready = left;
        shares
    }

    fn read_lane(&mut self, slot: usize, first: usize, messages: usize, bytes: usize) -> Share {
        let mut share = Share { slot, messages: first..first, bytes: 0, emptied: false, odd: None, broken: false };
        let watched = self.watched[slot].as_mut().expect("it is ready");
        let (socket, Some(lane)) = (&watched.socket, &mut watched.lane) else {
            return share;
        };
        let mut before = None;
        let mut size = 0;
        while share.messages.len() < messages && size <= bytes {
            if self.read.len() == share.messages.end {
                self.read.push(Read::new(&self.library));
            }
            let read = &mut self.read[share.messages.end];
            match read.receive(socket) {
                Looked::Regular => {}
                Looked::Nothing => {
                    share.emptied = true;
                    break;
                }
                Looked::Odd(frames) => {
                    share.odd = Some(frames);
                    break;
                }
                Looked::Broken => {
                    share.broken = true;
                    break;
                }
            }
            let [_, sequence, payload] = &mut read.frames;
            let payload = payload.bytes();
            let Some(head) = lane.accepts(before, sequence.bytes(), payload) else {
                share.odd = Some(read.copied(3));
                read.clear();
                break;
            };
            size += payload.len();
            read.head = Some(head);
            before = Some(head);
            share.messages.end += 1;
            share.bytes += read.size() as u64;
        }
        share
    }

    /// Apply what was read of a lane. True: more comes than is read.
    fn take(&mut self, share: &Share) -> bool {
        let watched = self.watched[share.slot].as_mut().expect("it was read");
        let Some(lane) = &mut watched.lane else {
            return false;
        };
        for read in &mut self.read[share.messages.clone()] {
            let payload = read.frames[2].bytes();
            self.index.change(&lane.worker, |worker, shared| worker.apply_payload(shared, payload)); // ended meanwhile: nobody's
            if let Some(head) = read.head {
                lane.took(head);
            }
        }
        if share.emptied {
            watched.backlog = Backlog { emptied: true, ..Backlog::default() };
        } else {
            watched.backlog.messages += share.messages.len() as u64;
            watched.backlog.bytes += share.bytes;
        }
        watched.backlog.messages > self.limits.messages || watched.backlog.bytes > self.limits.bytes
    }

    fn report(&mut self, taken: &HashSet<usize>, mut asking: HashMap<u64, Vec<Frames>>) -> Vec<Report> {
        let mut reports = Vec::with_capacity(taken.len() + asking.len());
        for slot in taken {
            let watched = self.at(*slot);
            let Backlog { messages, bytes, emptied } = std::mem::take(&mut watched.backlog);
            let handed = asking.remove(&watched.stream);
            reports.push(Report {
                stream: watched.stream,
                tally: watched.lane.as_mut().and_then(Lane::tally),
                seconds: std::mem::take(&mut watched.seconds),
                messages,
                bytes,
                emptied,
                asks: handed.is_some(),
                handed: handed.unwrap_or_default(),
            });
        }
        for (stream, handed) in asking {
            reports.push(Report { stream, handed, asks: true, ..Report::default() });
        }
        for report in reports.iter().filter(|report| report.asks) {
            for slot in self.by_stream.get(&report.stream).cloned().unwrap_or_default() {
                self.at(slot).lane = None;
                self.set_ready(slot);
            }
        }
        reports
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zmq::fake::{self, Fake};
    use kvsync_index::Facts;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    const LIMITS: Limits = Limits { pause: 5.0, messages: 10, bytes: 1 << 20 };

    /// One stream with a live socket and another one, its lane about to take number 0.
    struct Set {
        receiver: Receiver,
        live: Box<Fake>,
        other: Box<Fake>,
        call: UnixStream,
        _called: UnixStream,
        progress: Progress,
    }

    fn set() -> Set {
        let index = Arc::new(Index::new());
        index.add_worker("w", "m", Facts::default());
        let (call, called) = UnixStream::pair().unwrap();
        let mut receiver = Receiver::new(fake::library(), index, called.as_raw_fd(), LIMITS).unwrap();
        let (mut live, mut other) = (Fake::new(), Fake::new());
        for socket in [&mut live, &mut other] {
            // SAFETY: these are sockets of this library, and outlive the receiver's use of them.
            unsafe { receiver.add(1, socket.address()) }.unwrap();
        }
        let progress = receiver.follow(live.address().as_ptr().addr(), "w", 0, 100.0).unwrap();
        Set { receiver, live, other, call, _called: called, progress }
    }

    impl Set {
        fn publish(&mut self, numbers: std::ops::Range<u64>) {
            for number in numbers {
                let payload = [&[0x92, 0xcb][..], &100.0f64.to_be_bytes(), &[0x90]].concat();
                self.live.frames.extend([(vec![], true), (number.to_be_bytes().to_vec(), true), (payload, false)]);
            }
            self.live.far.write_all(b"x").unwrap();
        }

        fn wait(&mut self, messages: usize) -> Vec<Report> {
            self.receiver.wait(Duration::ZERO, messages, 1 << 20)
        }
    }

    #[test]
    fn what_continues_the_stream_is_taken_and_told() {
        let mut set = set();
        set.publish(0..3);
        let [report] = &set.wait(100)[..] else { panic!("one stream") };
        let tally = report.tally.as_ref().unwrap();
        assert_eq!((tally.count, tally.last, report.emptied, report.asks), (3, 2, true, false));
        assert_eq!(set.progress.count(), 3);
    }

    #[test]
    fn nothing_is_taken_if_another_socket_had_news_when_it_was_read() {
        let mut set = set();
        set.publish(0..3);
        set.other.frames.push_back((vec![], false));
        // As if the news came just while the last message was read: before that, nothing shows it.
        assert!(!set.receiver.look(Duration::ZERO));
        set.receiver.ready.retain(|slot| *slot == 0);
        set.receiver.at(1).ready = false;
        set.live.then = Some(set.other.far.try_clone().unwrap());
        let [report] = &set.wait(100)[..] else { panic!("one stream") };
        assert!(report.asks && report.tally.is_none());
        assert_eq!(report.handed.len(), 3);
        assert_eq!(set.progress.count(), 0);
    }

    #[test]
    fn nothing_is_taken_if_the_owner_called_when_it_was_read() {
        let mut set = set();
        set.publish(0..3);
        set.live.then = Some(set.call.try_clone().unwrap());
        let [report] = &set.wait(100)[..] else { panic!("one stream") };
        assert_eq!((report.handed.len(), report.asks, set.progress.count()), (3, true, 0));
    }
}
