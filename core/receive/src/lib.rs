//! The way from ZeroMQ sockets to the index that takes no turn in Python.
//!
//! The sockets are made, configured, connected and closed by pyzmq; this crate reads them with the very library that
//! pyzmq has loaded ([`Library`]). It decides nothing about a stream: [`Lane`] knows the one case in which there is
//! nothing to decide, and everything else goes to whoever owns the stream, in order ([`Receiver`]).
//!
//! Linux only: it waits with epoll.

#![cfg(target_os = "linux")]

mod lane;
mod poll;
mod receiver;
mod zmq;

pub use lane::{Lane, Progress, Tally};
pub use receiver::{Frames, Limits, Receiver, Report};
pub use zmq::{Library, Unusable};
