package engine

import (
	"sync"
	"time"

	"go.uber.org/zap"
)

// reports turns what the workers meet into one log line a change of state,
// however many partitions meet it.
type reports struct {
	mu       sync.Mutex
	down     map[string]int // partitions in outage, by outbox
	broken   map[any]bool   // who finds that the storage fails
	observed bool           // a panic of the observer was logged
}

func (e *Engine) outageBegan(outbox string, err error) {
	e.reports.mu.Lock()
	defer e.reports.mu.Unlock()
	if e.reports.down == nil {
		e.reports.down = make(map[string]int)
	}
	e.reports.down[outbox]++
	if e.reports.down[outbox] == 1 {
		e.log.Warn("destination is unavailable; messages wait, none is charged", zap.String("outbox", outbox), zap.Error(err))
	}
}

func (e *Engine) outageEnded(outbox string) {
	e.reports.mu.Lock()
	defer e.reports.mu.Unlock()
	e.reports.down[outbox]--
	if e.reports.down[outbox] == 0 {
		e.log.Info("destination is available again", zap.String("outbox", outbox))
	}
}

// storageFailed notes that somebody, a worker or a loop, met a failure of the
// storage. For others it may work.
func (e *Engine) storageFailed(who any, err error) {
	e.reports.mu.Lock()
	defer e.reports.mu.Unlock()
	if e.reports.broken == nil {
		e.reports.broken = make(map[any]bool)
	}
	first := len(e.reports.broken) == 0
	e.reports.broken[who] = true
	if first {
		e.log.Warn("storage fails; workers try again", zap.Error(err))
	}
}

func (e *Engine) storageWorks(who any) {
	e.reports.mu.Lock()
	defer e.reports.mu.Unlock()
	if !e.reports.broken[who] {
		return
	}
	delete(e.reports.broken, who)
	if len(e.reports.broken) == 0 {
		e.log.Info("storage works again")
	}
}

// observe tells the observer, whose panics are its own affair.
func (e *Engine) observe(o Observation) {
	if e.config.Observer == nil {
		return
	}
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		e.reports.mu.Lock()
		defer e.reports.mu.Unlock()
		if !e.reports.observed {
			e.reports.observed = true
			e.log.Error("observer panicked; further panics are not logged", zap.Any("panic", p))
		}
	}()
	e.config.Observer.Observe(o)
}

// PartitionState is what this process knows of one partition it serves.
type PartitionState struct {
	Outbox    string
	Partition int
	// Owning: this process owns the partition at the moment.
	Owning bool
	// Stuck: a relay call that ignored the end of its context still runs.
	Stuck bool
	// Outage is why the destination counts as unavailable, and Since since
	// when; nil and zero if it does not.
	Outage error
	Since  time.Time
}

// States returns the state of each partition that this process serves or, when
// it does not run, served last; by outbox and partition. One that is gone since
// the partition count became smaller is listed as long as work on it goes on.
func (e *Engine) States() []PartitionState {
	e.mu.Lock()
	defer e.mu.Unlock()
	var states []PartitionState
	for _, w := range e.all() {
		s := PartitionState{Outbox: w.config.Name, Partition: w.number, Owning: w.owning.Load(), Stuck: w.stuckCall() != nil}
		if d := w.down.Load(); d != nil {
			s.Outage, s.Since = d.err, d.since
		}
		if w.number < e.outboxes[s.Outbox].active || s.Owning || s.Stuck {
			states = append(states, s)
		}
	}
	return states
}
