//! Which of the public listener's faces a request is for.

use actix_web::http::Method;
use routing::request::Route;

/// A face of the public listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Face<'a> {
    /// Is the process alive?
    Live,
    /// Should a balancer send requests here?
    Ready,
    /// The models served by any endpoint.
    Models,
    /// One of them.
    Model(&'a str),
    /// A request whose body tells where it belongs.
    Generate(Route),
    /// A response that was made before, to be got, cancelled or deleted where it was made.
    Response(&'a str),
    /// Anything else: passed through to some endpoint.
    Other,
}

impl<'a> Face<'a> {
    /// The face at this path (without its query).
    pub(crate) fn of(method: &Method, path: &'a str) -> Self {
        let route = Route::of(path);
        if route != Route::Other {
            return if method == Method::POST { Self::Generate(route) } else { Self::Other };
        }
        let reads = method == Method::GET || method == Method::HEAD;
        match path {
            "/livez" if reads => Self::Live,
            "/readyz" if reads => Self::Ready,
            "/v1/models" if reads => Self::Models,
            _ => {
                if let Some(model) = path.strip_prefix("/v1/models/")
                    && reads
                    && !model.is_empty()
                {
                    return Self::Model(model);
                }
                match path.strip_prefix("/v1/responses/").and_then(|rest| rest.split('/').next()) {
                    Some(id) if !id.is_empty() => Self::Response(id),
                    _ => Self::Other,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(method: &Method, path: &str, want: Face<'_>) {
        assert_eq!(Face::of(method, path), want, "{method} {path}");
    }

    #[test]
    fn paths_find_their_faces() {
        check(&Method::POST, "/v1/chat/completions", Face::Generate(Route::ChatCompletions));
        check(&Method::POST, "/v1/responses", Face::Generate(Route::Responses));
        check(&Method::GET, "/v1/chat/completions", Face::Other);
        check(&Method::GET, "/v1/responses/resp_1", Face::Response("resp_1"));
        check(&Method::POST, "/v1/responses/resp_1/cancel", Face::Response("resp_1"));
        check(&Method::DELETE, "/v1/responses/resp_1", Face::Response("resp_1"));
        check(&Method::POST, "/v1/responses/", Face::Other);
        check(&Method::GET, "/v1/models", Face::Models);
        check(&Method::GET, "/v1/models/org/name", Face::Model("org/name"));
        check(&Method::POST, "/v1/models", Face::Other);
        check(&Method::GET, "/livez", Face::Live);
        check(&Method::POST, "/readyz", Face::Other);
        check(&Method::POST, "/tokenize", Face::Other);
    }
}
