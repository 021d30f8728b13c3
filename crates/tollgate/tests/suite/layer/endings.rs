//! However requests end, what is left of every quota is exactly what their endings say.
//!
//! | `charge` | keeps the units of |
//! |---|---|
//! | `always` | every request that was admitted |
//! | `on_failure` | those whose response was a failure (a status from 400, an error of the service), and those without a response |
//! | `on_success` | those whose response was a success, and those without a response |
//!
//! A request has no response if its client left before, an outer timeout cut it off, or the service panicked.
//!
//! Random requests end in random ways behind the layer. A ledger is kept of what each ending must have cost, and compared with
//! what the layer says afterwards, and with the counters of shadow rules, which nobody is told of.

mod in_process;
mod ledger;
mod on_redis;
mod over_sockets;
mod scripted;
