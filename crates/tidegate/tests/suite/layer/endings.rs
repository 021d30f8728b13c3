//! Requests that end in random ways, and exactly the charges that their endings require.
//!
//! | `charge` | keeps the units of |
//! |---|---|
//! | `always` | every request that was admitted |
//! | `on_failure` | those whose response was a failure (a status from 400, an error of the service), and those without a response |
//! | `on_success` | those whose response was a success, and those without a response |
//!
//! A request has no response if its client closed the connection, an outer timeout dropped it, or the service panicked.
//!
//! A ledger records what each ending must cost. It is compared with the `RateLimit` header afterwards, and with the counters
//! of shadow rules, which no header shows.

mod in_process;
mod ledger;
mod on_redis;
mod over_sockets;
mod scripted;
