//! The event stream of one request: a queue between the engine thread and one reader, blocking or async.
//!
//! The engine never waits on it, and may add several events before it wakes the reader: waking costs a core that computes. A reader that falls behind by the buffer's length makes the engine pause that request's slot
//! (`is_full`), so memory stays bounded and other requests go on.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::request::Event;

#[derive(Default)]
struct Inner {
    events: VecDeque<Event>,
    /// The engine will send nothing more.
    closed: bool,
    /// The reader is gone.
    cancelled: bool,
    waker: Option<Waker>,
}

struct Shared {
    inner: Mutex<Inner>,
    ready: Condvar,
    /// Wakes an engine that sleeps because nothing can be decoded.
    on_change: Box<dyn Fn() + Send + Sync>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reading end. Dropping it cancels the request; its slot is free within one window.
pub struct RequestStream {
    shared: Arc<Shared>,
    id: u64,
    limit: usize,
}

/// The engine's end.
pub(crate) struct EventSender {
    shared: Arc<Shared>,
    limit: usize,
}

/// Makes a connected pair. `limit` is how many unread events make the sender report itself full.
pub(crate) fn channel(id: u64, limit: usize, on_change: Box<dyn Fn() + Send + Sync>) -> (EventSender, RequestStream) {
    let shared = Arc::new(Shared { inner: Mutex::new(Inner::default()), ready: Condvar::new(), on_change });
    (EventSender { shared: shared.clone(), limit }, RequestStream { shared, id, limit })
}

impl EventSender {
    /// Adds an event and wakes the reader. Never blocks.
    pub(crate) fn send(&self, event: Event) {
        self.post(event);
        self.wake();
    }

    /// Adds an event that the reader sees when it looks or when it is woken the next time.
    pub(crate) fn post(&self, event: Event) {
        let mut inner = self.shared.lock();
        if !inner.cancelled && !inner.closed {
            inner.closed = matches!(event, Event::Finished { .. } | Event::Failed(_));
            inner.events.push_back(event);
        }
    }

    /// Wakes a waiting reader.
    pub(crate) fn wake(&self) {
        let waker = self.shared.lock().waker.take();
        self.shared.ready.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The reader dropped its end.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.shared.lock().cancelled
    }

    /// The reader is behind by the whole buffer.
    pub(crate) fn is_full(&self) -> bool {
        self.shared.lock().events.len() >= self.limit
    }
}

impl Drop for EventSender {
    fn drop(&mut self) {
        self.send(Event::Failed("the engine ended before the request did".into()));
    }
}

impl RequestStream {
    /// Number of the request, unique within its engine.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The next event; waits for it. `None` after the last one.
    pub fn recv(&mut self) -> Option<Event> {
        let mut inner = self.shared.lock();
        loop {
            if let Some(event) = inner.events.pop_front() {
                return self.taken(inner, event);
            }
            if inner.closed {
                return None;
            }
            inner = self.shared.ready.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The next event if it comes within `timeout`. `Err(())` on a timeout.
    #[allow(clippy::result_unit_err)]
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Event>, ()> {
        let deadline = Instant::now() + timeout;
        let mut inner = self.shared.lock();
        loop {
            if let Some(event) = inner.events.pop_front() {
                return Ok(self.taken(inner, event));
            }
            if inner.closed {
                return Ok(None);
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(());
            }
            inner = self.shared.ready.wait_timeout(inner, deadline - now).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The next event, for async callers of any runtime.
    pub fn recv_async(&mut self) -> RecvEvent<'_> {
        RecvEvent { stream: self }
    }

    /// The next event, as a poll function (for `Stream` adaptors).
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let mut inner = self.shared.lock();
        if let Some(event) = inner.events.pop_front() {
            return Poll::Ready(self.taken(inner, event));
        }
        if inner.closed {
            return Poll::Ready(None);
        }
        inner.waker = Some(context.waker().clone());
        Poll::Pending
    }

    fn taken(&self, inner: MutexGuard<'_, Inner>, event: Event) -> Option<Event> {
        let resumes = inner.events.len() + 1 == self.limit;
        drop(inner);
        if resumes {
            (self.shared.on_change)();
        }
        Some(event)
    }
}

impl Iterator for RequestStream {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.recv()
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        let wakes = {
            let mut inner = self.shared.lock();
            inner.cancelled = true;
            inner.events.clear();
            !inner.closed
        };
        if wakes {
            (self.shared.on_change)();
        }
    }
}

/// Future of [`RequestStream::recv_async`].
pub struct RecvEvent<'a> {
    stream: &'a mut RequestStream,
}

impl Future for RecvEvent<'_> {
    type Output = Option<Event>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.stream.poll_recv(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn token(id: u32) -> Event {
        Event::Token { id, text: String::new(), logprobs: None }
    }

    #[test]
    fn events_arrive_in_order_and_end_after_the_last() {
        let (sender, mut stream) = channel(1, 4, Box::new(|| {}));
        sender.send(token(1));
        sender.send(token(2));
        sender.send(Event::Failed("over".into()));
        sender.send(token(3));
        let ids: Vec<_> = stream.by_ref().map(|event| matches!(event, Event::Token { .. })).collect();
        assert_eq!(ids, [true, true, false]);
        assert!(stream.recv().is_none());
    }

    #[test]
    fn a_posted_event_is_seen_by_who_looks_and_wakes_nobody_until_told() {
        let (sender, mut stream) = channel(1, 4, Box::new(|| {}));
        sender.post(token(1));
        assert!(matches!(stream.recv_timeout(Duration::ZERO), Ok(Some(Event::Token { id: 1, .. }))));
        let waiting = std::thread::spawn(move || stream.recv_timeout(Duration::from_secs(60)));
        std::thread::sleep(Duration::from_millis(20));
        sender.post(token(2));
        sender.wake();
        assert!(matches!(waiting.join().unwrap(), Ok(Some(Event::Token { id: 2, .. }))));
    }

    #[test]
    fn a_full_buffer_is_reported_and_reading_wakes_the_engine_once() {
        let wakes = Arc::new(AtomicUsize::new(0));
        let counter = wakes.clone();
        let (sender, mut stream) = channel(
            1,
            2,
            Box::new(move || {
                counter.fetch_add(1, Ordering::SeqCst);
            }),
        );
        sender.send(token(1));
        assert!(!sender.is_full());
        sender.send(token(2));
        assert!(sender.is_full());
        stream.recv();
        assert!(!sender.is_full());
        stream.recv();
        assert_eq!(wakes.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn dropping_the_reader_cancels_and_dropping_the_sender_fails_the_request() {
        let (sender, stream) = channel(1, 2, Box::new(|| {}));
        drop(stream);
        assert!(sender.is_cancelled());
        let (sender, mut stream) = channel(1, 2, Box::new(|| {}));
        drop(sender);
        assert!(matches!(stream.recv(), Some(Event::Failed(_))));
        assert!(matches!(stream.recv_timeout(Duration::ZERO), Ok(None)));
    }
}
