//! Connections: takes them, ends those whose client does not send its request, and lets open ones finish at the end.

use super::App;
use super::router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Pause after a connection could not be taken (out of file descriptors, for one).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until `stop` resolves, then lets open requests finish. The caller bounds how long.
pub async fn serve(
    app: Arc<App>,
    listener: TcpListener,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    // One version: finding out which one a client speaks would wait for its first bytes without a limit.
    let mut builder = Builder::new(TokioExecutor::new()).http1_only();
    // Also bounds how long a connection is kept open for the next request.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(app.settings.read_timeout);
    let service = TowerToHyperService::new(router(app));
    let (stopping, stopped) = watch::channel(false);
    let mut connections = JoinSet::new();
    tokio::pin!(stop);
    loop {
        let socket = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((socket, _)) => socket,
                Err(_) => {
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
            // Forgets those that are done.
            Some(_) = connections.join_next() => continue,
            () = &mut stop => break,
        };
        // Events are small and must not wait for each other. A socket that is gone already says so when it is read.
        let _ = socket.set_nodelay(true);
        let (builder, service, mut stopped) = (builder.clone(), service.clone(), stopped.clone());
        connections.spawn(async move {
            let connection = builder.serve_connection(TokioIo::new(socket), service);
            tokio::pin!(connection);
            // A client that broke off is no error of the server.
            tokio::select! {
                _ = connection.as_mut() => return,
                _ = stopped.changed() => connection.as_mut().graceful_shutdown(),
            }
            let _ = connection.await;
        });
    }
    drop(listener);
    // The receivers are the connections; there may be none.
    let _ = stopping.send(true);
    while connections.join_next().await.is_some() {}
    Ok(())
}
