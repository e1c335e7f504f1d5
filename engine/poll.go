package engine

import (
	"context"
	"time"

	"go.uber.org/zap"
)

const (
	// pruneChunk is the number of messages that one statement prunes: small,
	// so that it holds its locks briefly and what it did survives a cancel.
	pruneChunk = 1000
	// remapChunk is the same for moving messages to other lanes.
	remapChunk = 5000
)

// Who meets a failing storage, beside workers.
const (
	whoPolls  = "poll"
	whoPrunes = "prune"
)

// pollLoop finds what no wake-up told: messages of other processes while push
// is down, lost hints, due times, a changed partition count.
func (e *Engine) pollLoop(r *running) {
	tick := time.NewTicker(e.config.PollInterval)
	defer tick.Stop()
	e.poll(r.scope)
	last := time.Now()
	for {
		select {
		case <-r.soft.Done():
			return
		case <-tick.C:
		}
		if time.Since(last) < e.untilNextPoll()-e.config.PollInterval/2 {
			continue
		}
		last = time.Now()
		e.poll(r.scope)
	}
}

// untilNextPoll is the time between two polls. Polls happen on ticks of
// PollInterval, so that one is due soon after the push has stopped working.
func (e *Engine) untilNextPoll() time.Duration {
	if e.PushState() == Push {
		return max(PushPollInterval, e.config.PollInterval)
	}
	return e.config.PollInterval
}

// poll looks once at every table, applies the partition counts in force, and
// wakes whoever has something to do. Simultaneous calls share one look.
func (e *Engine) poll(s *scope) {
	if !e.probing.TryLock() {
		return
	}
	defer e.probing.Unlock()
	ctx, cancel := context.WithTimeout(s.soft, PushPollInterval)
	defer cancel()
	probed, err := e.config.Storage.Probe(ctx, e.names())
	switch {
	case s.stopping():
		return
	case err != nil:
		e.storageFailed(whoPolls, err)
		return
	}
	e.storageWorks(whoPolls)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.apply(probed)
	for name, p := range probed {
		if o := e.outboxes[name]; o != nil && !p.Paused {
			o.nudge(p, e.untilNextPoll())
		}
	}
}

// nudge wakes the workers that have something to do, and those that will have
// before the next poll when it is due.
func (o *outbox) nudge(p Probed, nextPoll time.Duration) {
	for _, i := range p.Ready {
		if i < o.active {
			o.workers[i].nudge()
		}
	}
	if p.Stray && o.active > 0 {
		o.workers[0].nudge() // its fetch says so again, and it remaps
	}
	for i, due := range p.NextDue {
		if i < o.active && due <= nextPoll {
			time.AfterFunc(due+time.Millisecond, o.workers[i].nudge)
		}
	}
}

// pruneLoop removes what is past its retention, now and then.
func (e *Engine) pruneLoop(r *running) {
	if !e.retains() {
		return
	}
	tick := time.NewTicker(jitter(e.config.PruneInterval))
	defer tick.Stop()
	for {
		if _, err := e.Prune(r.soft); err == nil {
			e.storageWorks(whoPrunes)
		} else if !r.stopping() {
			e.storageFailed(whoPrunes, err)
		}
		select {
		case <-r.soft.Done():
			return
		case <-tick.C:
		}
	}
}

// retains reports whether any outbox keeps messages for a bounded time.
func (e *Engine) retains() bool {
	for _, o := range e.config.Outboxes {
		if o.Retention.KeepFor() > 0 || o.DeadRetention > 0 {
			return true
		}
	}
	return false
}

// Prune removes the delivered and dead messages past their retention in small
// chunks, each committed by itself, and returns how many. When it fails or ctx
// ends, what was removed stays removed.
func (e *Engine) Prune(ctx context.Context) (int, error) {
	total := 0
	for _, o := range e.config.Outboxes {
		q := PruneQuery{Outbox: o.Name, Delivered: -1, Dead: -1, Limit: pruneChunk}
		if d := o.Retention.KeepFor(); d > 0 {
			q.Delivered = d
		}
		if o.DeadRetention > 0 {
			q.Dead = o.DeadRetention
		}
		if q.Delivered < 0 && q.Dead < 0 {
			continue
		}
		for more := true; more; {
			n, err := e.config.Storage.Prune(ctx, q)
			total += n
			if err != nil {
				return total, err
			}
			more = n == q.Limit
		}
	}
	return total, nil
}

// settleAgain records a settlement that its claim could not, a few times.
func (e *Engine) settleAgain(ctx context.Context, outbox string, s Settlement) error {
	p := newPause()
	defer p.stop()
	for try := 1; ; try++ {
		err := e.config.Storage.Settle(ctx, outbox, s)
		if err == nil {
			e.log.Warn("a settlement was recorded late", zap.String("outbox", outbox), zap.Int("delivered", len(s.Delivered)))
			return nil
		}
		if try == settleTries {
			return err
		}
		p.timer.Reset(p.longer(faultMin, faultMax))
		if !p.wait(nil, ctx.Done()) {
			return err
		}
	}
}

const settleTries = 4
