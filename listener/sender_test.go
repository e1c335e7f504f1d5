package listener_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/listener"
)

// wire is where a sender sends to.
type wire struct {
	latency time.Duration

	mu     sync.Mutex
	err    error
	rounds [][]engine.Wake // those that arrived
	tried  int
}

func (w *wire) notify(ctx context.Context, wakes []engine.Wake) error {
	select {
	case <-time.After(w.latency):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tried++
	if w.err == nil {
		w.rounds = append(w.rounds, wakes)
	}
	return w.err
}

func (w *wire) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = err
}

func (w *wire) arrived() [][]engine.Wake {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.rounds)
}

func observed() (*zap.Logger, *observer.ObservedLogs) {
	core, logs := observer.New(zapcore.InfoLevel)
	return zap.New(core), logs
}

func TestSenderSendsTheFirstAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := &wire{}
		s := listener.NewSender(w.notify, nil)
		begin := time.Now()
		s.Send([]engine.Wake{wake("orders", 1)})
		if err := s.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(begin); d != 0 {
			t.Errorf("out after %v", d)
		}
		// Nobody closes the sender: the bubble ends only if no goroutine is left.
	})
}

// C26
func TestSenderMergesWhatArrivesDuringARound(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := &wire{latency: time.Second}
		s := listener.NewSender(w.notify, nil)
		s.Send([]engine.Wake{wake("orders", 1)})
		synctest.Wait()
		for range 1000 {
			s.Send([]engine.Wake{wake("orders", 2), wake("mails", 3), wake("orders", 1)})
		}
		for hash := range uint64(65) {
			s.Send([]engine.Wake{wake("busy", hash)})
		}
		for hash := range uint64(64) {
			s.Send([]engine.Wake{wake("calm", hash%64)})
		}
		s.Send([]engine.Wake{{Outbox: "whole", All: true}, wake("whole", 7)})
		s.Send(nil)
		if err := s.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		want := []engine.Wake{{Outbox: "busy", All: true}}
		for hash := range uint64(64) {
			want = append(want, wake("calm", hash))
		}
		want = append(want, wake("mails", 3), wake("orders", 1), wake("orders", 2), engine.Wake{Outbox: "whole", All: true})
		got := w.arrived()
		if len(got) != 2 || !slices.Equal(got[0], []engine.Wake{wake("orders", 1)}) || !slices.Equal(got[1], want) {
			t.Errorf("rounds %v, want the first wake, then %v", got, want)
		}
	})
}

// C26
func TestSenderPacesItself(t *testing.T) {
	t.Parallel()
	for _, latency := range []time.Duration{0, 300 * time.Microsecond, 4 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			w := &wire{latency: latency}
			s := listener.NewSender(w.notify, nil)
			for hash := range uint64(5000) { // for a second
				s.Send([]engine.Wake{wake("orders", hash)})
				time.Sleep(200 * time.Microsecond)
			}
			if err := s.Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
			rounds := w.arrived()
			if n := len(rounds); n < 150 || n > 202 {
				t.Errorf("latency %v: %d rounds in a second", latency, n)
			}
			sent := 0
			for _, r := range rounds {
				sent += len(r)
			}
			if sent != 5000 {
				t.Errorf("latency %v: %d of 5000 wakes arrived", latency, sent)
			}
		})
	}
}

// Where there is nothing to merge nothing waits for it.
func TestSenderIsPromptWhereLittleIsSent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := &wire{}
		s := listener.NewSender(w.notify, nil)
		for hash := range uint64(200) { // for a second
			s.Send([]engine.Wake{wake("orders", hash)})
			synctest.Wait()
			if n := len(w.arrived()); n != int(hash)+1 {
				t.Fatalf("%d rounds after wake %d, want one for each at once", n, hash)
			}
			time.Sleep(5 * time.Millisecond)
		}
	})
}

func TestSenderTriesAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		logger, logs := observed()
		w := &wire{err: errors.New("connection reset")}
		s := listener.NewSender(w.notify, logger)
		s.Send([]engine.Wake{wake("orders", 1)})
		synctest.Wait()
		w.fail(nil)
		if err := s.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		if w.tried != 2 || len(w.rounds) != 1 || logs.Len() != 0 {
			t.Errorf("tried %d times, %d arrived, log %v", w.tried, len(w.rounds), logs.All())
		}
	})
}

func TestSenderDropsWhatFailsAndSaysSoOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		logger, logs := observed()
		down := errors.New("connection refused")
		w := &wire{err: down}
		s := listener.NewSender(w.notify, logger)
		for range 10 {
			s.Send([]engine.Wake{wake("orders", 1)})
			if err := s.Flush(t.Context()); !errors.Is(err, down) {
				t.Fatalf("flush: %v, want the error of the round", err)
			}
		}
		if w.tried != 30 {
			t.Errorf("tried %d times, want three for each round", w.tried)
		}
		if logs.Len() != 1 || logs.All()[0].Level != zapcore.WarnLevel {
			t.Errorf("log: %v, want one warning", logs.All())
		}
		w.fail(nil)
		for range 10 {
			s.Send([]engine.Wake{wake("orders", 2)})
			if err := s.Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if logs.Len() != 2 || logs.All()[1].Level != zapcore.InfoLevel {
			t.Errorf("log: %v, want a line about the recovery", logs.All())
		}
		if got := w.arrived(); len(got) != 10 || !slices.Equal(got[0], []engine.Wake{wake("orders", 2)}) {
			t.Errorf("arrived: %v", got)
		}
	})
}

func TestSenderBoundsAnAttempt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := &wire{latency: time.Hour}
		s := listener.NewSender(w.notify, nil)
		s.Send([]engine.Wake{wake("orders", 1)})
		begin := time.Now()
		if err := s.Flush(t.Context()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("flush: %v", err)
		}
		if d := time.Since(begin); d > 20*time.Second {
			t.Errorf("a round that hangs took %v", d)
		}
	})
}

func TestSenderFlush(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := &wire{latency: time.Second}
		s := listener.NewSender(w.notify, nil)
		if err := s.Flush(t.Context()); err != nil {
			t.Errorf("nothing to flush: %v", err)
		}
		s.Send([]engine.Wake{wake("orders", 1)})
		synctest.Wait()
		s.Send([]engine.Wake{wake("orders", 2)})
		short, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel()
		if err := s.Flush(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("flush that ran out of time: %v", err)
		}
		if err := s.Flush(t.Context()); err != nil {
			t.Error(err)
		}
		if got := w.arrived(); len(got) != 2 {
			t.Errorf("after Flush has arrived %v, want both rounds", got)
		}
	})
}

func TestSenderClose(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := &wire{latency: time.Second}
		s := listener.NewSender(w.notify, nil)
		s.Send([]engine.Wake{wake("orders", 1)})
		for range 2 {
			if err := s.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
		s.Send([]engine.Wake{wake("orders", 2)})
		if err := s.Flush(t.Context()); err != nil {
			t.Error(err)
		}
		if got := w.arrived(); len(got) != 1 {
			t.Errorf("arrived: %v, want what was sent before Close", got)
		}
	})
}

func TestSenderCloseCutsOff(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		logger, logs := observed()
		w := &wire{latency: 3 * time.Second}
		s := listener.NewSender(w.notify, logger)
		s.Send([]engine.Wake{wake("orders", 1)})
		synctest.Wait()
		s.Send([]engine.Wake{wake("orders", 2)})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := s.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("close: %v", err)
		}
		if err := s.Flush(t.Context()); err != nil && !errors.Is(err, listener.ErrClosed) {
			t.Errorf("flush after close: %v", err)
		}
		synctest.Wait()
		if got := w.arrived(); len(got) != 0 || logs.Len() != 0 {
			t.Errorf("arrived: %v, log %v", got, logs.All())
		}
	})
}

func TestSenderLosesNothing(t *testing.T) {
	t.Parallel()
	w := &wire{}
	s := listener.NewSender(w.notify, nil)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 50 {
				s.Send([]engine.Wake{{Outbox: "orders", Hash: uint64(g*50 + i)}})
				if i%10 == 0 {
					if err := s.Flush(t.Context()); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := map[uint64]bool{}
	for _, round := range w.arrived() {
		for _, w := range round {
			if w.All {
				return // covers everything
			}
			got[w.Hash] = true
		}
	}
	if len(got) != 400 {
		t.Errorf("%d of 400 wakes arrived", len(got))
	}
}
