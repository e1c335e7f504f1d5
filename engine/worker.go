package engine

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

const (
	// A worker gives its partition and its slot back after this many batches
	// or this much time, so that other partitions and other nodes get a turn.
	maxRunBatches = 16
	maxRunTime    = time.Second
	// A busy partition is asked for again after busyMin, doubled to busyMax.
	busyMin = 5 * time.Millisecond
	busyMax = 250 * time.Millisecond
	// The same for a database that does not answer.
	faultMin = 100 * time.Millisecond
	faultMax = 5 * time.Second
	// For this long after it found a partition busy an engine yields longer.
	rivalry = 10 * time.Second
)

// verdict is how a run ended, which says when the next one is due.
type verdict int

const (
	idle    verdict = iota // nothing more is ready
	yield                  // more is ready, but others have a turn first
	busy                   // another worker owns the partition
	out                    // the destination is unavailable
	fault                  // the database failed, or the ownership was lost
	stray                  // messages wait in lanes of another partition count
	moved                  // the partition count is another one
	stopped                // the engine stops
)

// worker serves one partition. Its loop runs between Start and Stop; Drain runs
// it as well, in turns with the loop.
type worker struct {
	engine *Engine
	config *OutboxConfig
	number int
	wake   chan struct{} // of one: a wake-up is a hint

	partitions atomic.Int64              // the count in force as far as known
	stuck      atomic.Pointer[relayCall] // an abandoned call
	owning     atomic.Bool
	down       atomic.Pointer[downtime] // nil: the destination is available

	turn    chan struct{} // of one: held by who runs; guards what follows
	scope   *scope        // of the run
	tally   *tally        // of the run
	health  *health
	nextDue time.Duration // of the last page; negative: none
}

// ending is how a run ended, and what the wait after it depends on.
type ending struct {
	verdict
	err      error         // of a fault
	took     time.Duration // by the run
	nextDue  time.Duration // until the next message is due; negative: none
	failures int           // of the destination in a row
}

func newWorker(e *Engine, config *OutboxConfig, number, partitions int) *worker {
	w := &worker{
		engine: e, config: config, number: number,
		wake:   make(chan struct{}, 1),
		turn:   make(chan struct{}, 1),
		health: newHealth(config),
	}
	w.partitions.Store(int64(partitions))
	return w
}

func (w *worker) lane() Lane {
	return Lane{Outbox: w.config.Name, Partition: w.number, Partitions: int(w.partitions.Load())}
}

// nudge wakes the worker, now or when it is done with what it does.
func (w *worker) nudge() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// loop serves the partition until quit is closed.
func (w *worker) loop(s *scope, quit <-chan struct{}) {
	pause := newPause()
	defer pause.stop()
	for pause.wait(w.wake, quit) {
		if !w.awaitStuck(quit) {
			return
		}
		end := w.takeTurn(s, &tally{}, quit)
		switch end.verdict {
		case stopped:
			return
		case moved:
			w.engine.poll(s)
		case stray:
			end.verdict, _ = w.remap(s)
		}
		pause.set(end, w)
	}
}

// takeTurn runs when nobody else runs this worker and a delivery slot is free.
// Slots are given in the order of asking.
func (w *worker) takeTurn(s *scope, t *tally, quit <-chan struct{}) ending {
	select {
	case w.turn <- struct{}{}:
		defer func() { <-w.turn }()
	case <-quit:
		return ending{verdict: stopped}
	}
	select {
	case w.engine.slots <- struct{}{}:
		defer func() { <-w.engine.slots }()
	case <-quit:
		return ending{verdict: stopped}
	}
	return w.run(s, t)
}

// run owns the partition for a bounded time and delivers what is ready. It is
// called with the turn and a slot.
func (w *worker) run(s *scope, t *tally) ending {
	w.scope, w.tally = s, t
	if w.stuckCall() != nil {
		return ending{verdict: busy}
	}
	v := idle
	begun := time.Now()
	err := w.engine.config.Storage.WithPartition(w.scope.db, w.lane(), func(ctx context.Context, c Claim) error {
		defer w.owning.Store(false)
		var err error
		v, err = w.batches(ctx, c)
		return err
	})
	if err != nil {
		v = w.failed(err)
	} else {
		w.engine.storageWorks(w)
	}
	return ending{verdict: v, err: err, took: time.Since(begun), nextDue: w.nextDue, failures: w.health.failures}
}

// batches is the cycle: fetch, deliver, settle, and again while there is more.
func (w *worker) batches(ctx context.Context, c Claim) (verdict, error) {
	begun := time.Now()
	for n := 0; ; n++ {
		switch {
		case w.scope.stopping():
			return stopped, nil
		case n == maxRunBatches || time.Since(begun) > maxRunTime:
			return yield, nil
		}
		w.drainWake()
		page, err := c.Fetch(ctx, w.query())
		if err != nil {
			return fault, err
		}
		w.owning.Store(true)
		v, done, err := w.page(c, page)
		if done || err != nil {
			return v, err
		}
	}
}

// page handles one fetched page; done says that the run is over.
func (w *worker) page(c Claim, page Page) (v verdict, done bool, err error) {
	switch page.State {
	case PagePaused:
		w.nextDue = -1
		return idle, true, nil
	case PageMoved:
		return moved, true, nil
	case PageStray:
		return stray, true, nil
	}
	w.nextDue = page.NextDue
	if len(page.Envelopes) == 0 {
		if w.health.exhausted() == hold {
			w.outage(w.health.err)
			return out, true, nil
		}
		return idle, true, nil
	}
	if w.scope.stopping() {
		return stopped, true, nil
	}
	searched := w.health.searching() // then more than the page may be ready
	v, left, err := w.handle(c, page)
	if v != idle || err != nil {
		return v, true, err
	}
	// What a retry held back, or what is behind a message that died, is ready now.
	left = left || slices.ContainsFunc(page.Envelopes, retried)
	more := page.More || left || w.woken() || searched || w.health.searching()
	return idle, !more || w.tally.over, nil
}

// handle delivers a page and hands its settlement to the claim. It returns
// idle where the run can go on; left says that its settlement may have made
// messages ready, or given them a time to wait for, since the page was fetched:
// everything but plain deliveries at the first attempt.
func (w *worker) handle(c Claim, page Page) (v verdict, left bool, err error) {
	begun := time.Now()
	o := w.deliver(c, page)
	if o.abandoned {
		w.observe(Observation{Kind: DeliveryAbandoned, Err: o.outage, Took: time.Since(begun)})
		w.engine.log.Warn("relay ignores the end of its context; its partition waits for it to return",
			zap.String("outbox", w.config.Name), zap.Int("partition", w.number), zap.Error(o.outage))
		w.outage(o.outage)
		return out, false, o.outage // the claim is dropped: its outcome is unknown
	}
	lost := c.Alive(w.scope.db)
	what := carryOn
	if interrupted := lost != nil || w.scope.hard.Err() != nil; o.progress() || !interrupted {
		what = w.health.after(page.Envelopes, &o)
	}
	if what == blame {
		w.config.charge(&o.settlement, &page.Envelopes[0], o.outage, page.Now)
		o.notAttempted, o.outage = 0, nil
	}
	c.Settle(o.settlement)
	w.count(&o, page, time.Since(begun))
	switch {
	case lost != nil && o.progress():
		return fault, false, &SettleError{Settlement: o.settlement, Err: lost}
	case lost != nil:
		return fault, false, lost
	case what == hold:
		w.outage(o.outage)
		return out, false, nil
	case o.delivered() > 0:
		w.recovered()
	}
	return idle, o.delivered() < len(page.Envelopes) || slices.ContainsFunc(page.Envelopes, retried), nil
}

// query asks for the next batch.
func (w *worker) query() Query {
	return Query{
		Limit:      w.health.limit,
		MaxBytes:   w.config.MaxBatchBytes,
		Ordering:   w.config.Ordering,
		HoldDead:   w.config.AfterDead == HoldGroup,
		SkipGroups: slices.Concat(w.health.suspects.groups, w.tally.tried.groups),
		SkipIDs:    slices.Concat(w.health.suspects.ids, w.tally.tried.ids),
		Lease:      w.config.DeliverTimeout + abandonGrace,
	}
}

// failed sorts out why a claim ended with an error. A settlement that could
// not be recorded is tried again by itself: the messages were delivered, and
// recording it twice does no harm.
func (w *worker) failed(err error) verdict {
	switch {
	case errors.Is(err, ErrBusy):
		w.engine.metRival()
		return busy
	case errors.Is(err, errAbandoned):
		return out
	}
	if errors.Is(err, ErrOwnershipLost) {
		w.observe(Observation{Kind: OwnershipLost, Err: err})
	}
	if unsettled, ok := errors.AsType[*SettleError](err); ok {
		if again := w.engine.settleAgain(w.scope.db, w.config.Name, unsettled.Settlement); again == nil {
			return yield
		}
		w.observe(Observation{Kind: SettleFailed, Err: err})
	}
	w.engine.storageFailed(w, err)
	return fault
}

// remap moves messages that wait in lanes of another partition count.
func (w *worker) remap(s *scope) (verdict, error) {
	n, more, err := w.engine.config.Storage.Remap(s.db, w.config.Name, remapChunk)
	switch {
	case err != nil:
		w.engine.storageFailed(w, err)
		return fault, err
	case n == 0 && more:
		return busy, nil
	}
	w.engine.Wake(Wake{Outbox: w.config.Name, All: true}) // they may be anybody's now
	return yield, nil
}

func (w *worker) drainWake() {
	select {
	case <-w.wake:
	default:
	}
}

// woken reports whether a wake-up came since the last fetch began.
func (w *worker) woken() bool { return len(w.wake) > 0 }

// downtime is an outage as this worker sees it.
type downtime struct {
	since time.Time
	err   error
}

// outage notes that the destination is unavailable.
func (w *worker) outage(err error) {
	w.health.window()
	d := &downtime{since: time.Now(), err: err}
	if was := w.down.Load(); was != nil {
		d.since = was.since
		w.down.Store(d)
		return
	}
	w.down.Store(d)
	w.observe(Observation{Kind: OutageBegan, Err: err})
	w.engine.outageBegan(w.config.Name, err)
}

func (w *worker) recovered() {
	if w.down.Swap(nil) == nil {
		return
	}
	w.observe(Observation{Kind: OutageEnded})
	w.engine.outageEnded(w.config.Name)
}

func (w *worker) count(o *outcome, page Page, took time.Duration) {
	w.tally.add(page.Envelopes, o, w.config.Ordering)
	oldest := page.Now
	for i := range page.Envelopes {
		due := page.Envelopes[i].DueAt
		if at := page.Envelopes[i].ScheduledAt; at.After(due) {
			due = at // a retry was not due before
		}
		if due.Before(oldest) {
			oldest = due
		}
	}
	w.observe(Observation{
		Kind: BatchDone, Delivered: o.delivered(), Failed: len(o.settlement.Failed), Dead: len(o.settlement.Dead),
		NotAttempted: o.notAttempted, Took: took, Lag: page.Now.Sub(oldest), Err: o.outage,
	})
}

func (w *worker) observe(o Observation) {
	o.Outbox, o.Partition = w.config.Name, w.number
	w.engine.observe(o)
}

// jitter spreads d by a fifth, so that nodes do not move in step.
func jitter(d time.Duration) time.Duration {
	return d - d/10 + rand.N(d/5+1)
}
