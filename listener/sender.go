package listener

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gormoutbox/outbox/backoff"
	"github.com/gormoutbox/outbox/engine"
)

const (
	// sendPace is the least time between the beginnings of two rounds after one
	// that told of several commits: at most 200 statements a second, however
	// many transactions commit.
	sendPace = 5 * time.Millisecond
	// quietPace is the same after a round that told of one. Where there is
	// little to merge, waiting for more would only be late.
	quietPace = time.Millisecond
	// sendTimeout bounds one attempt of a round.
	sendTimeout = 5 * time.Second
	// sendAttempts is how often a round is tried before it is dropped.
	sendAttempts = 3
)

var sendBackoff = backoff.Exponential{Initial: 50 * time.Millisecond, Max: time.Second}

// ErrClosed is what Sender.Flush returns for wakes that Close has dropped.
var ErrClosed = errors.New("listener: sender is closed")

// Sender notifies other processes, in rounds of one statement. A wake is sent
// at once if nothing is on its way. Otherwise it waits for the next round,
// together with all others that arrive until then, each once.
//
// It runs a goroutine only while there is something to send, so that a process
// which merely publishes has nothing to start and nothing to stop. All methods
// are safe for concurrent use.
type Sender struct {
	notify func(context.Context, []engine.Wake) error
	logger *zap.Logger
	ctx    context.Context
	cancel context.CancelCauseFunc

	mu      sync.Mutex
	running bool   // the goroutine
	current *round // on its way
	next    *round // gathers what comes after current
	closed  bool

	// Of the running goroutine, which hands them to the next one under mu.
	begun   time.Time // when the last round began
	pace    time.Duration
	failing bool // the last round was dropped
}

// round is what one statement sends.
type round struct {
	wakes wakeSet
	sends int           // how often Send was called for it
	done  chan struct{} // closed when it is out, or dropped with err
	err   error
}

// NewSender returns a sender that calls notify for each round. notify is
// called by one goroutine at a time and must honour its context. A nil logger
// logs nothing.
func NewSender(notify func(context.Context, []engine.Wake) error, logger *zap.Logger) *Sender {
	if logger == nil {
		logger = zap.NewNop()
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	return &Sender{notify: notify, logger: logger, ctx: ctx, cancel: cancel}
}

// Send has the wakes sent soon. It does not block. A round that fails three
// times is dropped, for the poll of the other processes finds the messages all
// the same. After Close, Send does nothing.
func (s *Sender) Send(wakes []engine.Wake) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(wakes) == 0 {
		return
	}
	if s.next == nil {
		s.next = &round{wakes: wakeSet{}, done: make(chan struct{})}
	}
	s.next.wakes.add(wakes)
	s.next.sends++
	if !s.running {
		s.running = true
		go s.run()
	}
}

// Flush waits until everything that was sent before is out. Its error says
// that something was dropped or, if ctx ended first, may still be on its way.
func (s *Sender) Flush(ctx context.Context) error {
	s.mu.Lock()
	rounds := [...]*round{s.current, s.next}
	s.mu.Unlock()
	var errs []error
	for _, r := range rounds {
		if r == nil {
			continue
		}
		select {
		case <-r.done:
			errs = append(errs, r.err)
		case <-ctx.Done():
			return fmt.Errorf("flush notifications: %w", context.Cause(ctx))
		}
	}
	return errors.Join(errs...)
}

// Close refuses further wakes, flushes, and when ctx ends drops what is not
// out by then. It may be called again.
func (s *Sender) Close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	err := s.Flush(ctx)
	s.cancel(ErrClosed)
	return err
}

// run sends rounds until there is nothing to send.
func (s *Sender) run() {
	for more := true; more; {
		s.wait(time.Until(s.begun.Add(s.pace)))
		s.begun = time.Now()

		s.mu.Lock()
		r := s.next
		s.current, s.next = r, nil
		s.mu.Unlock()

		s.pace = quietPace
		if r.sends > 1 {
			s.pace = sendPace
		}
		r.err = s.send(r.wakes.list())

		s.mu.Lock()
		s.current = nil
		more = s.next != nil
		s.running = more
		s.mu.Unlock()
		close(r.done)
	}
}

// send sends one round, trying again for a while.
func (s *Sender) send(wakes []engine.Wake) error {
	var err error
	for attempt := 1; attempt <= sendAttempts; attempt++ {
		if s.ctx.Err() != nil {
			return context.Cause(s.ctx)
		}
		if err = s.try(wakes); err == nil {
			if s.failing {
				s.failing = false
				s.logger.Info("notifications go out again")
			}
			return nil
		}
		if attempt < sendAttempts {
			s.wait(sendBackoff.Delay(attempt))
		}
	}
	if !s.failing {
		s.failing = true
		s.logger.Warn("notifications do not go out: other processes find messages by polling", zap.Error(err))
	}
	return fmt.Errorf("send notifications: %w", err)
}

func (s *Sender) try(wakes []engine.Wake) error {
	ctx, cancel := context.WithTimeout(s.ctx, sendTimeout)
	defer cancel()
	return s.notify(ctx, wakes)
}

// wait waits for d, or until Close has run out of time.
func (s *Sender) wait(d time.Duration) {
	if d <= 0 {
		return
	}
	select {
	case <-time.After(d):
	case <-s.ctx.Done():
	}
}
