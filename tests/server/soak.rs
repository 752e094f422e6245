//! A short soak: random load with vanishing clients and bad requests; every answer equals its solo answer.
//! `scripts/soak_server.py` is the long version.

use super::batch::{alone, requests};
use super::client::{Said, Server, said, said_streamed};
use serde_json::json;
use std::io::Read;
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";
const CLIENTS: u64 = 6;
const STEPS: usize = 14;

/// A small generator, so that a failure can be repeated.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

#[test]
fn mixed_load_with_trouble_gives_every_request_its_solo_answer() {
    let server = Server::start(&["--parallel", "4", "--ctx-size", "2048", "--cache-ram", "8", "-q"]);
    let bodies = requests();
    let want: Vec<Said> = bodies.iter().map(|b| alone(&server, b)).collect();
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (server, bodies, want) = (&server, &bodies, &want);
            scope.spawn(move || {
                let mut dice = Dice(client + 1);
                for _ in 0..STEPS {
                    let pick = dice.below(bodies.len() as u64) as usize;
                    let mut body = bodies[pick].clone();
                    body["cache_prompt"] = json!(dice.below(8) > 0);
                    match dice.below(10) {
                        0 => {
                            body["messages"] = json!([{"role": "user", "content": 5}]);
                            assert_eq!(server.post(CHAT, &body).status, 400);
                        }
                        1 => {
                            body["stream"] = json!(true);
                            let mut socket = server.open(CHAT, &body);
                            let mut some = vec![0; 100 + dice.below(900) as usize];
                            socket.read_exact(&mut some).expect("the beginning of a reply");
                        }
                        2 => {
                            let socket = server.open(CHAT, &body);
                            std::thread::sleep(Duration::from_millis(dice.below(80)));
                            drop(socket);
                        }
                        n if n % 2 == 0 => assert_eq!(said(&server.ask(CHAT, &body), 0), want[pick], "{body}"),
                        _ => assert_eq!(said_streamed(&server.stream(CHAT, &body), 0), want[pick], "{body}"),
                    }
                }
            });
        }
    });
    server.wait_metric("vllm:num_requests_running", 0.0, Duration::from_secs(10));
    assert_eq!(server.metric("strata:request_failures_total"), 0.0);
}
