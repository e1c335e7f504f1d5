// Package engine delivers stored messages: it holds the vocabulary of delivery
// (Envelope, Relay, the errors), what it asks of a database (Storage) and of a
// source of wake-ups (Waker), and the workers between them. It knows no SQL.
//
// This page is the design: what a worker does, what owning a partition means
// and does not mean, how a culprit is told from an outage, and what happens
// when something breaks.
//
// # The worker
//
// An outbox has a number of partitions, and an engine one worker for each. A
// worker takes turns with the other workers of the process for one of
// MaxDeliveries slots, and with those of other nodes for the partition. A run
// goes like this:
//
//	own the partition, fetch a batch      Claim.Fetch
//	hand it to the relay, wait            Relay.Deliver
//	judge the answer                      OutboxConfig.judge, health
//	record it, own anew, fetch again      Claim.Settle, Claim.Fetch
//
// It ends when nothing more is ready, after 16 batches or a second, or when
// something is in the way. How it ended says what the worker waits for:
//
//	idle     nothing is ready          a wake-up, or the next due time
//	yield    more is ready, but others a fiftieth of the run, 0.5 to 20 ms; an
//	         have a turn               eighth, 2 to 100 ms, where in the last 10 s
//	                                   somebody else was met
//	busy     somebody else owns it     5 ms, doubled to 250 ms
//	out      the destination is down   the outbox's backoff, 100 ms to 30 s
//	fault    the database failed, or   100 ms, doubled to 5 s
//	         the ownership was lost
//	stray    messages lie in lanes of  moves them, then as after yield, or busy
//	         another partition count   if a lane is owned
//	moved    the count in force is     looks at the counts, then as busy
//	         another one
//	stopped  the engine stops          -
//
// Only idle is cut short by wake-ups. A wake-up is a send on a channel of one:
// it is never lost while the worker is at work, and never counted. A worker
// whose relay call was abandoned (see below) waits for its return before
// anything else.
//
// Whatever no wake-up told is found by the poll: one probe of the storage for
// all outboxes and partitions, every PollInterval, or every 30 s while the
// Waker says that its hints get through. An idle engine does nothing else.
//
// # Ownership
//
// At most one worker in the cluster owns a lane, which is a partition under a
// partition count. The count in force is a fact in the database; a worker that
// finds another one delivers nothing, and nobody delivers while messages lie in
// lanes of other counts, because nothing is known of the order of their groups.
//
// Ownership dies with its owner: on Postgres it is a lock of the transaction in
// which the batch was read and will be settled, on SQLite one of the process.
// The engine does not renew it, and no clock decides on it while the owner
// lives. It ends between two batches, so that nodes can take turns, and the
// fetch that follows sees what the last owner settled.
//
// A lock cannot reach into a network. An owner that lost it may still be
// sending until it notices, while the next one already delivers:
//
//   - When the connection breaks visibly, the worker is told (Claim.Watch) as
//     soon as the end of the connection arrives, or within 500 ms where the
//     driver has to ask. The delivery's context ends with the cause
//     ErrOwnershipLost. Each looks before every message; it sends at most what
//     it is just sending.
//   - When it breaks silently (a dead link, a failover that nobody announces),
//     the owner goes on until the delivery's context ends: DeliverTimeout after
//     the batch was fetched, and a second of grace until the call is abandoned.
//     The server where the owner's transaction is, ends it 5 s later than that
//     (idle_in_transaction_session_timeout), so there nobody takes over while
//     an owner is still sending. A new primary knows nothing of the lock: there
//     both may send for DeliverTimeout and a second.
//   - A process that was stopped (SIGSTOP, a suspended machine) and goes on
//     after the server gave its partition away finds its context at an end, or
//     its connection closed, as soon as its goroutines run. Until then it
//     sends what it was just sending. Where the machine's clock stood still
//     meanwhile and the end of the connection is not heard of, the rest of
//     DeliverTimeout is the bound.
//   - A relay that ignores its context may send for as long as it likes. One
//     second after the end of the context the call is abandoned: its partition
//     is free for other nodes, its answer is thrown away, and this process does
//     not serve the partition before the call has returned.
//
// All that makes duplicates, never losses, and they carry the same DedupID. A
// consumer that must not see an older message after a newer one of a group has
// to compare their ids (Envelope.ID rises within a group).
//
// # Outage or poison
//
// A relay that names the messages which failed (BatchError) is believed: those
// are charged, one of a group at most, and the others were delivered. So is one
// that says that the destination is down (BatchError.Outage, Unavailable):
// nobody is charged and the worker waits. What was not attempted is not
// charged, nor is what a stop or a lost partition interrupted.
//
// A relay that has one error for a whole batch leaves open which of the two it
// was. Three such batches in a row, with waits between them, or one where the
// destination was up a moment ago or a message of the batch has failed before,
// make the worker narrow down: it goes on with single messages.
//
//	fails alone                  suspect; left aside, with its group
//	another gets through         one suspect is accused, and tried again
//	the accused fails at once    charged
//	the accused gets through     all suspects are cleared
//	three fail and none passes   an outage: wait; nobody is charged
//	only suspects are left       the same: nobody to compare them with
//
// So an outage is never charged, save that one which begins between two sends
// of this search may cost one message an attempt. A message that fails alone in
// an idle partition counts as an outage until there is other traffic, and so
// does the first message of a total order, which nobody may pass: a relay for
// such an outbox does well to name what failed. Batches grow back by doubling.
//
// A panic of the relay, and runtime.Goexit, are never the destination's doing:
// the worker narrows down at once and charges the message it is left with.
//
// # Time
//
// What is due is decided by the database's clock: due times, retention,
// GiveUpAfter, and retry delays, which are stored as a distance from the moment
// of settling. The process's clock only measures how long to wait. A clock that
// is wrong, jumps, or differs between nodes makes nothing early, late or lost.
//
// # Goroutines
//
//	a loop for each partition         Start to Stop; owner: running.work
//	poll loop, prune loop, Listen     the same
//	the end of a run                  waits for all of them, then closes Done
//	a relay call                      one a batch; its worker waits for it until
//	                                  it is abandoned, then the next Stop does
//	a drain, one for each partition   Drain waits for them
//
// A stop has three steps (scope): no batch is begun; at the deadline deliveries
// are cancelled; 5 s later the work on the database is, which meanwhile records
// what was delivered.
//
// # Locks
//
// In the order in which they are taken; none is held while waiting for one that
// is further up:
//
//	worker.turn      one run of a worker at a time (its loop, or a drain)
//	Engine.slots     MaxDeliveries; given in the order of asking
//	the lane         in the storage, cluster-wide
//	Engine.probing   one poll at a time; held during the probe
//	Engine.mu        workers, counts, lifecycle; never held during a call of the
//	                 storage, the relay or the waker
//	reports.mu       what was logged
//
// # When something breaks
//
//	the process dies before the relay     nothing happened; the next owner
//	                                      fetches the batch
//	  during or after it, unsettled       the batch is delivered again, the same
//	                                      ids, uncharged
//	  after the settling                  nothing is left to do
//	the connection is lost                before or after the relay: as above;
//	                                      during it: the delivery is cancelled,
//	                                      what it had sent is settled through
//	                                      another connection
//	settling fails, or its outcome is     tried again four times by itself, for it
//	unknown                               can be repeated; then the batch is
//	                                      delivered again, uncharged (fault)
//	the database is down or read-only     found at the fetch, before anything is
//	                                      sent (fault); one log line
//	the destination is down               out; nothing is written; one log line
//	one message is poison                 charged, and its group waits; dead after
//	                                      MaxAttempts or GiveUpAfter, if set
//	the relay panics                      the message is charged, the stack is kept
//	the relay hangs                       DeliverTimeout ends its context (out)
//	  and ignores its context             abandoned after a second; its partition
//	                                      moves to another node
//	a stop comes in between               the batch has until its deadline; what
//	                                      was not sent by then is uncharged
//	the partition count changes           moved, stray: the backlog is moved, lane
//	                                      by lane, before anything is delivered
//	wake-ups are lost or late             the next poll finds the messages
//	clocks differ                         see Time
//	an observer panics                    caught; logged once
package engine
