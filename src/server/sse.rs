//! Server-sent events: an answer's outputs through a route's renderer, with signs of life while nothing comes.
//!
//! The client's reading speed is the only pace: outputs are taken from the engine's bounded buffer when the connection
//! asks for more. When the client goes, the stream is dropped, and with it the engine's request.

use super::answer::{Answer, Output};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, StreamExt};
use serde_json::Value;
use std::convert::Infallible;
use std::time::Duration;

/// Time without output after which a comment is sent.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// One event.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    /// Its name; OpenAI's chat events have none.
    pub name: Option<String>,
    /// Its data.
    pub data: String,
}

impl Frame {
    /// An event without a name.
    pub fn data(value: Value) -> Frame {
        Frame { name: None, data: value.to_string() }
    }

    /// An event named by its `type`, as the responses and messages APIs do.
    pub fn typed(value: Value) -> Frame {
        Frame { name: value["type"].as_str().map(str::to_owned), data: value.to_string() }
    }

    /// OpenAI's end mark.
    pub fn done() -> Frame {
        Frame { name: None, data: "[DONE]".into() }
    }
}

/// Streams an answer: `opening` first, then what `render` makes of each output, and of `None` at the end.
pub fn stream_answer(
    answer: Answer,
    opening: Vec<Frame>,
    mut render: impl FnMut(Option<(usize, Output)>) -> Vec<Frame> + Send + 'static,
) -> Response {
    let ended = stream::once(async { None });
    let frames = stream::iter(opening)
        .chain(answer.map(Some).chain(ended).flat_map(move |event| stream::iter(render(event))))
        .map(|frame| {
            // The name goes first: not every client waits for the blank line.
            let event = match frame.name {
                Some(name) => Event::default().event(name),
                None => Event::default(),
            };
            Ok::<_, Infallible>(event.data(frame.data))
        });
    let mut response = Sse::new(frames).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response();
    // Proxies that buffer would hold the pieces back.
    response.headers_mut().insert("x-accel-buffering", axum::http::HeaderValue::from_static("no"));
    response
}
