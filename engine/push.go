package engine

// PushState says how wake-ups from other nodes reach this engine.
func (e *Engine) PushState() PushState {
	if e.config.Waker == nil {
		return Polling
	}
	return e.config.Waker.State()
}
